"""`headrace.Export` and `headrace.Replica`: rows as they were exported, and predictions that a replica makes, bit for
bit, from columns of any form."""

import json
import subprocess
import sys

import httpx
import numpy as np
import pyarrow as pa
import pyarrow.fs
import pytest
import torch

from headrace import Export, HeadraceError, Replica
from headrace.dataset.features.served_events import describe_features
from headrace.dataset.spec.config import ColumnsPipe
from headrace.errors import Refused, SpecError
from headrace.http.listening import listen
from headrace.keys import sign_of_text
from headrace.trainer.replica.http_api import serving
from tests.fakes.served import SCHEMA, TEXTS, Job
from tests.s3_server import s3  # noqa: F401
from tests.unit.test_replica_server import Served


@pytest.fixture
def job(tmp_path):
    return Job(tmp_path)


def as_columns(samples):
    """The samples as a user has them: texts in place of their hashes."""
    by_sign = {sign_of_text(text.encode()): text for text in TEXTS}
    texts = [[by_sign[each] for each in sample] for sample in samples["b"].to_pylist()]
    place = samples.schema.get_field_index("b")
    return samples.set_column(place, "b", pa.array(texts, pa.list_(pa.string())))


def rows_of(job, slot):
    """What the job has of a slot: values by sign."""
    return {sign: values for (name, sign), values in job.rows.items() if name == slot}


def test_rows_are_those_of_the_whole_chain_in_every_form(job):
    job.export(1)
    last = job.export(2, forget=5)
    export = Export.open(last)
    assert (export.job, export.version, list(export.slots())) == ("small", 2, ["a", "b", "history"])
    wanted = rows_of(job, "a")
    table = export.rows("a")
    assert table.column_names == ["sign", "weight", "vector"] and len(table) == len(wanted)
    found = {row["sign"]: [row["weight"], *row["vector"]] for row in table.to_pylist()}
    assert found == wanted
    as_numpy, as_torch = export.rows("a", "numpy"), export.rows("a", "torch")
    assert as_numpy.vector.dtype == np.float32 and as_numpy.vector.shape == (len(wanted), 4)
    assert torch.equal(as_torch.vector, torch.from_numpy(np.array(as_numpy.vector)))
    assert as_torch.sign.tolist() == as_numpy.sign.astype(np.int64).tolist()


def test_the_current_export_of_a_folder_is_opened(job):
    job.export(1)
    job.export(2, point=False)
    assert Export.open(job.folder).version == 1


def test_predictions_are_those_of_the_job_from_columns_of_any_form(job):
    job.export(1)
    export, columns = Export.open(job.folder), as_columns(job.samples)
    found = export.predict(columns)
    assert found.column_names == ["ctr"] and found.schema.metadata[b"version"] == b"1"
    assert np.abs(found["ctr"].to_numpy() - job.predictions()).max() < 1e-5
    dictionary = {name: columns[name].to_pylist() for name in columns.column_names}
    dictionary["d"] = np.array(dictionary["d"], np.float32)
    assert export.predict(dictionary).equals(found)
    assert export.predict(columns.to_batches()[0]).equals(found)
    many = pa.concat_tables([columns] * 300)  # more than go at a time
    assert export.predict(many)["ctr"].to_pylist() == found["ctr"].to_pylist() * 300


def test_an_export_in_an_object_store_is_that_of_its_folder(job, s3, tmp_path):  # noqa: F811
    job.export(1)
    job.export(2)
    address = s3.uri("bucket", "exports")
    store, path = pa.fs.FileSystem.from_uri(address)
    pa.fs.copy_files(str(tmp_path), path, destination_filesystem=store)
    here, there = Export.open(job.folder), Export.open(address)
    assert there.version == 2 and there.rows("a").equals(here.rows("a"))
    assert there.predict(as_columns(job.samples)).equals(here.predict(as_columns(job.samples)))
    third = job.export(3)
    pa.fs.copy_files(str(third), f"{path}/t1/{third.name}", destination_filesystem=store)
    for export, delta in ((here, third), (there, s3.uri("bucket", f"exports/t1/{third.name}"))):
        export.apply(delta)
    assert there.version == 3
    assert there.predict(as_columns(job.samples)).equals(here.predict(as_columns(job.samples)))


EVENT = {"d": [0.5, 1.0], "shown": [{"a": 3, "b": "red", "history": 4}, {"a": 2, "b": "green", "history": 5}]}
AS_COLUMNS = {"a": [3, 2], "b": ["red", "green"], "history": [4, 5], "d": [[0.5, 1.0]] * 2}


def with_features(job):
    """The job as if it had pipe.kind = "columns"."""
    document = describe_features(ColumnsPipe(kind="columns", explode="shown"), SCHEMA)
    for slot in document["slots"]:
        slot.pop("weighted", None)
        slot["from"] = "d" if slot["name"] == "d" else f"shown.{slot['name']}"
    job.model = job.model | {"features": document}
    return job


def test_raw_events_are_predicted_as_their_columns_however_many_samples_they_have(job):
    with_features(job).export(1)
    export = Export.open(job.folder)
    found, wanted = export.predict(events=[EVENT]), export.predict(AS_COLUMNS)
    assert found["ctr"].equals(wanted["ctr"]) and found["event"].to_pylist() == [0, 0]
    assert export.predict(events=[json.dumps(EVENT)], outputs=["ctr"]).equals(found)
    many = export.predict(events=[EVENT, EVENT | {"shown": []}] * 3000)  # 6,000 samples: more than go at a time
    assert many["ctr"].to_pylist() == wanted["ctr"].to_pylist() * 3000
    assert many["event"].to_pylist() == [number for number in range(0, 6000, 2) for _ in range(2)]
    with pytest.raises(HeadraceError, match="event 5001: field 'd'"):
        export.predict(events=[EVENT] * 5001 + [EVENT | {"d": "x"}] + [EVENT] * 10)
    with pytest.raises(HeadraceError, match="no sample"):
        export.predict(events=[EVENT | {"shown": []}])


def test_times_that_are_no_number_for_each_sample_are_refused(job):
    job.export(1)
    export = Export.open(job.folder)
    for times in ([1.0], [1.0] * 3, ["soon", "later"], 5.0):
        with pytest.raises(SpecError, match="event_time: is not one number for each of the 2 samples"):
            export.predict(AS_COLUMNS, event_time=times)


def test_one_sample_with_plain_values_is_enough(job):
    job.export(1)
    found = Export.open(job.folder).predict(
        {"a": [3], "b": ["red"], "b.weight": [1.0], "history": [[]], "d": [[0.5, 1.0]]}
    )
    assert len(found) == 1


def test_a_delta_is_applied_and_the_predictions_are_those_of_its_version(job):
    job.export(1)
    export = Export.open(job.folder)
    before = export.predict(as_columns(job.samples))
    delta = job.export(2, forget=5)
    export.apply(delta)
    assert export.version == 2 and not export.predict(as_columns(job.samples)).equals(before)
    anew = Export.open(delta)
    assert anew.rows("a").equals(export.rows("a"))
    assert anew.predict(as_columns(job.samples)).equals(export.predict(as_columns(job.samples)))


def test_a_delta_that_does_not_follow_is_refused_and_nothing_changes(job):
    first = job.export(1)
    export = Export.open(first)
    predicted = export.predict(as_columns(job.samples))
    job.export(2)
    third = job.export(3)
    for other in (third, first):
        with pytest.raises(HeadraceError, match="does not follow 0000000001-base"):
            export.apply(other)
    damaged = third.parent / "0000000002-delta" / "dense.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    with pytest.raises(HeadraceError, match="other bytes than were written"):
        export.apply(damaged.parent)
    assert export.version == 1 and export.predict(as_columns(job.samples)).equals(predicted)


def test_bad_columns_are_refused_by_name(job):
    job.export(1)
    export, good = Export.open(job.folder), {"a": [3], "b": ["red"], "history": [[1]], "d": [[0.5, 1.0]]}
    for changed, words in [
        ({"a": None}, "no columns of one length|'a' is missing"),
        ({"a": ["red"]}, "a: is BYTES"),
        ({"a": [[1, None]]}, "a: .*missing value"),
        ({"a": [None]}, "a"),
        ({"a": [1, 2]}, "length"),
        ({"d": [[0.5]]}, "d: has the shape"),
        ({"c": [1]}, "no input 'c'"),
    ]:
        with pytest.raises(HeadraceError, match=words):
            export.predict(good | changed)
    with pytest.raises(SpecError, match="columns, or events"):
        export.predict()
    with pytest.raises(SpecError, match="no sparse slot 'e'|'e'"):
        export.rows("e")
    with pytest.raises(HeadraceError, match="is not an export"):
        Export.open(job.folder / "t1")


def test_a_replica_answers_the_bits_of_the_export(tmp_path):
    served = Served(tmp_path).serve(1, 2)
    columns = as_columns(served.job.samples)
    listener = listen("127.0.0.1", 0, "--listen")
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with serving(served.app, listener), Replica(url) as replica:
        assert replica.name == "small" and replica.model()["parameters"]["version"] == "2"
        found = replica.predict(columns)
        assert np.abs(found["ctr"].to_numpy() - served.job.predictions()).max() < 1e-5
        assert found.schema.metadata[b"version"] == b"2"
        assert replica.predict(columns, outputs=["ctr"]).equals(found)
        with pytest.raises(SpecError, match="no input 'c'"):
            replica.predict({"c": [1]})
    with Replica(url) as replica, pytest.raises(HeadraceError, match="does not answer"):
        replica.model()


def test_a_replica_predicts_raw_events_as_the_export_does(tmp_path):
    served = Served(tmp_path)
    with_features(served.job)
    served.serve(1)
    listener = listen("127.0.0.1", 0, "--listen")
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with serving(served.app, listener), Replica(url) as replica:
        found = replica.predict(events=[EVENT, EVENT])
        assert found["event"].to_pylist() == [0, 0, 1, 1]
        assert found["ctr"].to_pylist() == replica.predict(AS_COLUMNS)["ctr"].to_pylist() * 2
        with pytest.raises(SpecError, match="event 1: field 'd'"):
            replica.predict(events=[EVENT, EVENT | {"d": "x"}])


HOSTILE = {
    "no outputs": {"model_name": "small"},
    "a list": [],
    "no datatype": {"outputs": [{"name": "ctr", "shape": [1], "data": [0.5]}]},
    "texts": {"outputs": [{"name": "ctr", "datatype": "BYTES", "shape": [1], "data": ["x"]}]},
    "another shape": {"outputs": [{"name": "ctr", "datatype": "FP32", "shape": [7], "data": [0.5]}]},
    "two lengths": {
        "outputs": [{"name": name, "datatype": "FP32", "shape": [n], "data": [0.5] * n} for n, name in enumerate("abc")]
    },
    "no bytes": {"outputs": [{"name": "a", "datatype": "FP32", "shape": [2], "parameters": {"binary_data_size": 8}}]},
}


def answering(infer, models=({"name": "m"},)):
    def answer(request):
        return httpx.Response(200, json=infer if request.url.path.endswith("/infer") else models)

    return Replica("http://replica", "secret", transport=httpx.MockTransport(answer))


@pytest.mark.parametrize("case", HOSTILE)
def test_an_answer_of_another_shape_is_refused(case):
    with answering(HOSTILE[case]) as replica, pytest.raises(HeadraceError) as error:
        replica.predict({"a": [1]})
    assert "secret" not in str(error.value)


@pytest.mark.parametrize("models", [{}, [], ["small"], [{"name": 5}], 7])
def test_a_server_without_one_named_model_is_no_replica(models):
    with answering({}, models) as replica, pytest.raises(Refused):
        replica.model()


@pytest.mark.parametrize("token", ["hr_secret\n", "hr_secr\u00e9t", "hr secret"])
def test_a_token_that_is_none_is_not_shown(token):
    with pytest.raises(SpecError, match="is not a token") as error:
        Replica("http://127.0.0.1:1", token)
    assert token not in str(error.value)
    with pytest.raises(SpecError, match="is not of the form"):
        Replica("http://user:secret@127.0.0.1:1")


def test_numbers_of_sixteen_bits_are_read():
    told = {"outputs": [{"name": "a", "datatype": "BF16", "shape": [1], "parameters": {"binary_data_size": 2}}]}
    head = json.dumps(told).encode()

    def answer(request):
        if not request.url.path.endswith("/infer"):
            return httpx.Response(200, json=[{"name": "m"}])
        length = {"Inference-Header-Content-Length": str(len(head))}
        return httpx.Response(200, headers=length, content=head + np.array([0x3FC0], "<u2").tobytes())

    with Replica("http://replica", transport=httpx.MockTransport(answer)) as replica:
        assert replica.predict({"a": [1]})["a"].to_pylist() == [1.5]


def test_reading_rows_and_predicting_need_no_torch(job):
    last = job.export(1)
    program = (
        "import sys, headrace; export = headrace.Export.open(sys.argv[1]); export.rows('a');"
        "export.predict({'a': [3], 'b': ['red'], 'history': [[1]], 'd': [[0.5, 1.0]]});"
        "headrace.Replica; assert 'torch' not in sys.modules and 'fastapi' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program, str(last)], check=True, timeout=110)
