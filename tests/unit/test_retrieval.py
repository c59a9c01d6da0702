"""A replica retrieves items: the best ones by one version, those of filters, page by page; it refuses with a reason."""

import json
import math
import os
from dataclasses import replace
from functools import partial

import httpx
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.deadline import Deadline
from headrace.errors import BadInput, SpecError
from headrace.service.python.exported_items import ExportedItems
from headrace.service.python.replica_client import Replica
from headrace.trainer.exports.destination import ExportFolder, folder_destination
from headrace.trainer.exports.item_file import index_in, write_items
from headrace.trainer.exports.materialize import _file
from headrace.trainer.exports.reader import MODEL, ReadableExport
from headrace.trainer.models.item_counts import PART, log_shares
from headrace.trainer.predict.batch_retrieval import (
    BatchRetrieval,
    UsersFile,
    UsersRefused,
    _read,
    plan_segments,
    retrieve_parts,
)
from headrace.trainer.predict.output_files import PredictionOutput
from headrace.trainer.replica.candidate_ranking import CandidateRanker
from headrace.trainer.replica.http_api import gated
from headrace.trainer.replica.inference_handler import InferenceHandler
from headrace.trainer.replica.item_indexer import ItemIndexer
from headrace.trainer.replica.replica_metrics import ReplicaMetrics
from headrace.trainer.replica.replica_state import ReplicaState, UpdateRefused
from headrace.trainer.retrieval_config import RetrievalSection, check_retrieval
from headrace.trainer.serving import item_catalogue, item_index
from tests.fakes.exports import key
from tests.fakes.served_towers import GROUPS, TowersJob
from tests.unit.test_replica_server import QUIET, Served

RETRIEVE = "/v2/models/small/retrieve"


class ServedTowers(Served):
    """A replica of a job with two towers, without a process."""

    def __init__(self, folder, num_items=40, rankers=(), **more):
        super().__init__(folder)
        self.job, self.indexer = TowersJob(folder, num_items, **more), ItemIndexer()
        self.state = ReplicaState(5, 1 << 30, self.indexer)
        self.figures = ReplicaMetrics(self.state)
        self.answering = InferenceHandler(self.state, self.figures, self.config.max_batch, self.config.max_body)
        self.app = gated(self.state, QUIET, self.figures, self.config, self.answering, rankers)

    def learn(self, version, **more):
        self.state.apply(self.job.update(version, whole=self.state.served is None, **more))
        return self

    def look(self):
        """The thread of the catalogue, once."""
        if self.indexer.look(self.state.served_model):
            self.state.reindex()

    def retrieve(self, **asked):
        answer = self.ask("POST", RETRIEVE, asked)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def refused(self, status=400, **asked):
        answer = self.ask("POST", RETRIEVE, asked)
        assert answer.status_code == status, answer.text
        return answer.json()["error"]


@pytest.fixture
def served(tmp_path):
    return ServedTowers(tmp_path).learn(1)


def ids(answer, user=0):
    return answer["results"][user]["items"]


def test_the_best_items_of_each_user_come_with_their_scores_and_the_version(served):
    for version in (2, 3):
        served.learn(version)
        answer = served.retrieve(users=[{"user": 3}, {"user": [1]}, {"user": []}], k=7)
        assert answer["model_name"] == "small" and answer["model_version"] == str(version)
        for at, user in enumerate((3, 1)):
            best, found = served.job.best(user)[:7], answer["results"][at]
            assert found["items"] == [name for name, _ in best]
            assert np.allclose(found["scores"], [score for _, score in best], atol=1e-5)
        assert answer["results"][2]["scores"] == [0.0] * 7, "nobody knows this user"


def test_the_search_is_compiled_before_a_version_is_served(tmp_path, monkeypatch):
    searched = []
    monkeypatch.setattr(item_index, "search", lambda *arrays: searched.append([each.dtype for each in arrays]))
    served = ServedTowers(tmp_path).learn(1)
    (compiled,) = searched
    served.retrieve(users=[{"user": 3}], k=7)
    assert searched[1] == compiled, "a request has arrays of the same types"


def test_pages_by_cursor_give_every_item_once(served):
    seen, cursor = [], None
    while True:
        answer = served.retrieve(users=[{"user": 3}], k=9, cursor=[cursor])
        seen += ids(answer)
        if (cursor := answer["results"][0]["cursor"]) is None:
            break
    assert seen == [name for name, _ in served.job.best(3)]


def test_a_cursor_goes_with_its_user_by_any_version(served):
    first = served.retrieve(users=[{"user": 3}, {"user": 1}], k=9)
    mine, other = (each["cursor"] for each in first["results"])
    assert "cursor[0] is of another user" in served.refused(users=[{"user": 3}], cursor=[other])
    assert "cursor[1] is of another user" in served.refused(users=[{"user": 3}] * 2, cursor=[None, other])
    last = first["results"][0]["scores"][-1]
    served.learn(2)
    later = served.retrieve(users=[{"user": 3}], k=40, cursor=[mine])["results"][0]
    assert later["items"] == [name for name, score in served.job.best(3) if score < last]


FILTERS = {
    "allowed ids": ({"allowed": ["i3", "i8", "nothing"]}, lambda each: each["item"] in ("i3", "i8")),
    "none": ({"allowed": []}, lambda each: False),
    "excluded ids": ({"excluded": ["i3", "i8", "nothing"]}, lambda each: each["item"] not in ("i3", "i8")),
    "a list's value": ({"equal": {"kind": "news"}}, lambda each: "news" in each["kind"]),
    "one of several": ({"equal": {"kind": ["news", "music"]}}, lambda each: each["kind"][0] != "sports"),
    "a field that is no slot": ({"equal": {"year": 2007}}, lambda each: each["year"] == 2007),
    "a range": ({"range": {"price": {"min": 1, "max": 2.5}}}, lambda each: 1 <= each["price"] <= 2.5),
    "an open range": ({"range": {"year": {"min": 2020.5}}}, lambda each: each["year"] > 2020),
    "texts in a range": ({"range": {"item": {"max": "i2"}}}, lambda each: each["item"] <= "i2"),
    "all of it": (
        {"equal": {"kind": "news"}, "range": {"price": {"max": 3}}, "excluded": ["i0"]},
        lambda each: each["kind"] == ["news"] and each["price"] <= 3 and each["item"] != "i0",
    ),
}


@pytest.mark.parametrize("what", FILTERS)
def test_filters_let_through_what_fulfils_them(served, what):
    asked, open_of = FILTERS[what]
    answer = served.retrieve(users=[{"user": 3}], k=100, filter=asked)
    assert ids(answer) == [name for name, _ in served.job.best(3, open_of)]
    assert answer["results"][0]["cursor"] is None


def test_the_index_of_a_followed_version_equals_one_from_scratch(tmp_path):
    served = ServedTowers(tmp_path, 6000).learn(1)
    for version in range(2, 6):
        served.learn(version, gone=("i5",) if version == 4 else ())
    scratch = ReplicaState(5, 1 << 30, ItemIndexer())
    scratch.apply(served.job.whole(5))
    assert served.state.items.index.vectors_IV.tobytes() == scratch.items.index.vectors_IV.tobytes()
    assert served.state.items.index.there_I.tolist() == scratch.items.index.there_I.tolist()
    assert served.state.items.index.num_items == 5999, "i5 is gone"


def test_a_forgotten_item_is_gone_with_its_version_and_a_new_one_is_there(served):
    assert "i7" in ids(served.retrieve(users=[{"user": 3}], k=100))
    served.learn(2, gone=("i7",))
    assert "i7" not in ids(served.retrieve(users=[{"user": 3}], k=100))
    place = [each["item"] for each in served.job.items].index("i7")
    assert not served.state.items.index.vectors_IV[place].any(), "nor is its vector"
    served.learn(3)  # somebody sees it again
    served.state.apply(replace(served.job.whole(4), whole=True))
    assert ids(served.retrieve(users=[{"user": 3}], k=100)) == [name for name, _ in served.job.best(3)]


def test_unseen_items_are_found_if_the_job_says_so(tmp_path):
    served = ServedTowers(tmp_path, unseen=True).learn(1)
    served.learn(2, gone=("i7",))
    assert len(ids(served.retrieve(users=[{"user": 3}], k=100))) == 40


def test_a_rollback_answers_with_the_items_of_its_version(served):
    before = served.retrieve(users=[{"user": 3}], k=40)
    served.learn(2)
    assert served.retrieve(users=[{"user": 3}], k=40)["results"] != before["results"]
    assert served.ask("POST", "/v2/models/small/rollback", {"version": 1}).is_success
    assert served.retrieve(users=[{"user": 3}], k=40) == before


def test_a_changed_catalogue_is_searched_without_a_new_version(served):
    served.look()
    kept = served.state.items
    served.look()
    assert served.state.items is kept, "nothing changed"
    del served.job.items[3:]
    served.job.items[0]["year"] = 1999
    served.job.write()
    served.look()
    assert sorted(ids(served.retrieve(users=[{"user": 3}]))) == ["i0", "i1", "i2"]
    assert ids(served.retrieve(users=[{"user": 3}], filter={"equal": {"year": 1999}})) == ["i0"]


LONG = "i" * 100
CATALOGUES = {
    "no slot": ([{"item": "a", "kind": ["x"]}], "line 1: the item has no 'price'"),
    "a later one without": (
        [{"item": "a", "kind": ["x"], "price": 1}, {"item": "b", "price": 1}],
        "item 2: has no 'kind'",
    ),
    "twice": ([{"item": "a", "kind": [], "price": 1}] * 2, "items 1 and 2 have the same 'item', 'a'"),
    "not a number": (
        [{"item": "a", "kind": [], "price": 1}, {"item": "b", "kind": [], "price": math.nan}],
        "item 2: 'price' has a number that is not finite",
    ),
    "too large": ([{"item": "a", "kind": [], "price": 1e39}], "item 1: 'price' has a number that is not finite"),
    "an empty value": (
        [{"item": "a", "kind": ["x", "y"], "price": 1}, {"item": "b", "kind": [None], "price": 1}],
        "item 2: 'kind' has an empty value in a list",
    ),
    "another size": ([{"item": "a", "kind": [], "price": [1.0, 2.0]}], "item 1: 'price' has 2 numbers; the slot has 1"),
    "another type": ([{"item": 5, "kind": [], "price": 1}], "cannot be read"),
    "several ids": ([{"item": ["a", "b"], "kind": [], "price": 1}], "item 1: has 2 values of 'item'"),
    "no item": ([], "have no item"),
    "vectors too large": ([{"item": "i1", "kind": ["news"], "price": 3.4e38}], "'item_vector' is not finite"),
}


@pytest.mark.parametrize("what", CATALOGUES)
def test_a_bad_catalogue_is_refused_and_the_one_before_is_searched(served, what):
    items, why = CATALOGUES[what]
    good = served.job.items
    before = served.retrieve(users=[{"user": 3}])
    served.job.items = items
    served.job.write()
    served.look()
    assert served.retrieve(users=[{"user": 3}]) == before
    assert why in served.state.index_trouble
    assert why in served.ask("GET", "/v2/models/small").json()["parameters"]["items_trouble"]
    fresh = ReplicaState(5, 1 << 30, ItemIndexer())
    fresh.apply(served.job.whole(1))
    assert fresh.items is None and why in fresh.index_trouble, "it predicts, and retrieves nothing"
    served.job.items = good
    served.learn(2)
    assert served.retrieve(users=[{"user": 3}])["model_version"] == "2", "nor does it hold back a version"


def test_a_catalogue_without_vectors_by_one_version_may_have_them_by_the_next(tmp_path):
    served = ServedTowers(tmp_path)
    update = served.job.update(1, whole=True)
    with np.errstate(over="ignore", invalid="ignore"):
        served.state.apply(replace(update, dense={**update.dense, "i": np.full_like(update.dense["i"], 3e38)}))
    assert "not finite" in served.refused(503, users=[{"user": 3}])
    served.learn(2)
    assert served.retrieve(users=[{"user": 3}], k=40)["results"][0]["items"] and served.state.index_trouble == ""


def test_a_rollback_to_a_version_without_vectors_changes_nothing(tmp_path):
    served = ServedTowers(tmp_path)
    update = served.job.update(1, whole=True)
    with np.errstate(over="ignore", invalid="ignore"):
        served.state.apply(replace(update, dense={**update.dense, "i": np.full_like(update.dense["i"], 3e38)}))
        served.learn(2).learn(3, gone=("i7",))
        before = served.retrieve(users=[{"user": 3}], k=40)
        refused = served.ask("POST", "/v2/models/small/rollback", {"version": 1})
    assert refused.status_code == 409 and "version 1 cannot be served" in refused.json()["error"]
    assert served.retrieve(users=[{"user": 3}], k=40) == before
    served.learn(4)
    scratch = ReplicaState(5, 1 << 30, ItemIndexer())
    scratch.apply(served.job.whole(4))
    assert served.state.items.index.vectors_IV.tobytes() == scratch.items.index.vectors_IV.tobytes()


def test_texts_that_are_not_utf_8_are_refused(served):
    served.job.catalogue.write_bytes(served.job.catalogue.read_bytes().replace(b'"i1"', b'"i\xff"', 1))
    served.look()
    assert "Invalid UTF8" in served.state.index_trouble
    assert len(ids(served.retrieve(users=[{"user": 3}], k=100))) == 40


def test_a_catalogue_is_read_from_files_alone(served):
    served.job.catalogue.unlink()
    os.mkfifo(served.job.catalogue)  # to open it would take until somebody writes
    served.look()
    assert "is no file" in served.state.index_trouble


def test_a_file_that_changes_without_a_later_time_is_read_again(served):
    before = served.job.catalogue.stat()
    content = served.job.catalogue.read_bytes()
    served.job.catalogue.write_bytes(content.replace(b"2001", b"1901"))
    os.utime(served.job.catalogue, ns=(before.st_atime_ns, before.st_mtime_ns))
    served.look()
    assert ids(served.retrieve(users=[{"user": 3}], filter={"equal": {"year": 1901}})) == ["i1"]


def test_lines_may_begin_after_empty_ones(served):
    served.job.catalogue.write_bytes(b"\n \n" + served.job.catalogue.read_bytes())
    served.look()
    assert served.state.index_trouble == "" and served.state.items.index.num_items == 40


def test_whole_numbers_that_no_float_has_are_compared(served):
    for number, each in enumerate(served.job.items):
        each["at"] = (1 << 60) + number
    served.job.write()
    served.look()
    found = {
        "one of them": {"equal": {"at": [1.5, (1 << 60) + 3, 2.0**60]}},
        "none": {"equal": {"at": 1.5}},
        "all": {"range": {"at": {"min": 1.5, "max": (1 << 60) + 40}}},
    }
    told = {what: sorted(ids(served.retrieve(users=[{"user": 3}], k=100, filter=found[what]))) for what in found}
    assert told["one of them"] == ["i0", "i3"] and told["none"] == [] and len(told["all"]) == 40


def test_a_catalogue_that_is_repaired_is_searched(tmp_path):
    served = ServedTowers(tmp_path)
    served.job.catalogue.unlink()
    served.learn(1)
    assert "there is no file" in served.refused(503, users=[{"user": 3}])
    served.job.write()
    served.look()
    assert len(ids(served.retrieve(users=[{"user": 3}], k=100))) == 40
    assert served.state.index_trouble == ""


def test_more_items_than_an_index_has_room_for_are_refused(served, monkeypatch):
    monkeypatch.setattr(item_catalogue, "MAX_ITEMS", 40)
    served.job.items += [{**served.job.items[0], "item": "one more"}]
    served.job.write()
    served.look()
    assert "more than 40 items" in served.state.index_trouble
    assert len(ids(served.retrieve(users=[{"user": 3}], k=100))) == 40


def test_ten_million_items_are_refused_before_they_are_read(served, tmp_path):
    none = pa.nulls(10_000_000)
    pq.write_table(pa.table({"item": none, "kind": none, "price": none}), tmp_path / "items.parquet")
    other = ReplicaState(5, 1 << 30, ItemIndexer([str(tmp_path / "*.parquet")]))
    other.apply(served.job.whole(1))
    assert other.items is None and "10,000,000 items; an index has room for 1,048,576" in other.index_trouble


def test_a_catalogue_may_be_parquet(served, tmp_path):
    table = pa.table({name: [each[name] for each in served.job.items] for name in ("item", "kind", "price")})
    pq.write_table(table, tmp_path / "items.parquet")
    other = ReplicaState(5, 1 << 30, ItemIndexer([str(tmp_path / "*.parquet")]))
    other.apply(served.job.whole(1))
    assert other.items.index.vectors_IV.tobytes() == served.state.items.index.vectors_IV.tobytes()


def test_the_uncompressed_size_of_parquet_counts(served, tmp_path, monkeypatch):
    table = pa.table({name: [each[name] for each in served.job.items] for name in ("item", "kind", "price")})
    pq.write_table(table.append_column("text", pa.array(["x" * 10_000] * 40)), tmp_path / "items.parquet")
    assert (tmp_path / "items.parquet").stat().st_size < 10_000
    monkeypatch.setattr(item_catalogue, "MAX_BYTES", 10_000)
    other = ReplicaState(5, 1 << 30, ItemIndexer([str(tmp_path / "*.parquet")]))
    other.apply(served.job.whole(1))
    assert other.items is None and "more than 10,000 bytes" in other.index_trouble


def test_vectors_that_are_not_finite_refuse_the_version(served):
    update = served.job.update(2)
    large = {**update.dense, "p": np.full_like(update.dense["p"], 3e38), "i": np.full_like(update.dense["i"], 3e38)}
    with pytest.raises(UpdateRefused, match="item_vector"), np.errstate(over="ignore", invalid="ignore"):
        served.state.apply(replace(update, dense=large))
    assert served.retrieve(users=[{"user": 3}])["model_version"] == "1"
    served.job.dense = {name: value for name, value in served.job.dense.items()}
    served.learn(3)
    assert served.retrieve(users=[{"user": 3}])["model_version"] == "3"


REFUSED = {
    "no users": ({}, 'either "users" or "events"'),
    "none": ({"users": []}, '"users" is empty'),
    "unknown slot": ({"users": [{"usr": 1}]}, "users[0]: 'usr' is no slot; did you mean 'user'"),
    "a slot of the item": ({"users": [{"user": 1, "kind": "x"}]}, "users[0]: 'kind' is a slot of the item"),
    "no slot": ({"users": [{"user": 1}, {}]}, "users[1]: has no 'user'"),
    "a text for a number": ({"users": [{"user": "a"}]}, "user: data has values that are not UINT64"),
    "negative": ({"users": [{"user": -1}]}, "a sign is not from 0"),
    "k": ({"users": [{"user": 1}], "k": 0}, "k: Input should be greater than or equal to 1"),
    "too many items": ({"users": [{"user": 1}] * 20, "k": 10_000}, "20 users with 10000 items each; at most 131,072"),
    "too many users": ({"users": [{"user": 1}] * 1025}, "users: List should have at most 1024 items"),
    "unknown key": ({"users": [{"user": 1}], "kk": 3}, "kk: Extra inputs are not permitted"),
    "unknown field": ({"users": [{"user": 1}], "filter": {"equal": {"yeer": 1}}}, "items have no field 'yeer'"),
    "text for a number": ({"users": [{"user": 1}], "filter": {"equal": {"year": "x"}}}, "'x' cannot be compared"),
    "an id of another type": ({"users": [{"user": 1}], "filter": {"allowed": [5]}}, "filter.allowed: 5 is no id"),
    "lists have no order": (
        {"users": [{"user": 1}], "filter": {"range": {"kind": {"min": "a"}}}},
        "cannot be compared",
    ),
    "cursors": ({"users": [{"user": 1}], "cursor": ["x", "y"]}, '"cursor" has 2 entries for 1 users'),
    "cursor": ({"users": [{"user": 1}], "cursor": ["xyz="]}, "'xyz=' is no cursor"),
    "events": ({"events": [{"user": 1}]}, "no features of raw events"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_request_that_cannot_be_answered_is_refused_with_the_reason(served, what):
    asked, why = REFUSED[what]
    assert why in served.refused(**asked)


def test_a_model_without_items_says_so(tmp_path):
    served = Served(tmp_path).serve(1)
    answer = served.ask("POST", RETRIEVE, {"users": [{"a": 1}]})
    assert answer.status_code == 400 and "[retrieval]" in answer.json()["error"]
    assert Served(tmp_path / "other").ask("POST", RETRIEVE, {"users": [{}]}).status_code == 503


def test_figures_tell_the_items_and_their_cost(served):
    text = served.figures.exposition()[0].decode()
    assert "headrace_replica_items 40.0" in text
    assert "headrace_replica_index_seconds" in text
    assert json.loads(served.ask("GET", "/openapi.json").content)["paths"][RETRIEVE.replace("small", "{name}")]


@pytest.fixture
def ranked(tmp_path):
    """A replica with a ranking model, whose job has the same catalogue, and that job."""
    (tmp_path / "ranker").mkdir()
    job, state = TowersJob(tmp_path / "ranker"), ReplicaState(5, 1 << 30)
    job.name = "ranker"
    state.apply(job.update(7, whole=True))
    update = job.update(8)
    job.dense = {name: values / np.float32(16) for name, values in update.dense.items()}  # no probability is 1
    state.apply(replace(update, dense=job.dense))
    (tmp_path / "towers").mkdir()
    return ServedTowers(tmp_path / "towers", rankers=[CandidateRanker(state)]).learn(1), job


def test_candidates_come_in_the_order_of_the_ranking_model(ranked):
    served, job = ranked
    answer = served.retrieve(users=[{"user": 3}, {"user": 1}], k=5, rank_by="ranker", candidates=12)
    assert (answer["model_version"], answer["ranked_by"]) == ("1", {"model_name": "ranker", "model_version": "8"})
    for at, user in enumerate((3, 1)):
        candidates = [name for name, _ in served.job.best(user)[:12]]
        wanted = [(name, score) for name, score in job.best(user) if name in candidates][:5]
        assert ids(answer, at) == [name for name, _ in wanted]
        scores = [1 / (1 + math.exp(-score)) for _, score in wanted]
        assert np.allclose(answer["results"][at]["scores"], scores, rtol=1e-4)
    plain = served.retrieve(users=[{"user": 3}], k=5)
    assert plain["ranked_by"] is None and ids(plain) == [name for name, _ in served.job.best(3)[:5]]
    metadata = json.loads(served.ask("GET", "/v2/models/small").content)
    assert metadata["parameters"]["rankers"] == {"ranker": "8"}


NOT_RANKED = {
    "another name": ({"rank_by": "rankr"}, "there is no ranking model 'rankr'; did you mean 'ranker'"),
    "no such output": ({"rank_by": "ranker", "rank_output": "cvr"}, "there is no output 'cvr'"),
    "pages": ({"rank_by": "ranker", "cursor": [None]}, 'without "cursor"'),
    "candidates alone": ({"candidates": 9}, 'go with "rank_by"'),
    "too many": ({"rank_by": "ranker", "users": [{"user": 1}] * 9, "candidates": 1000}, "at most 8,192"),
    "a slot of no model": ({"rank_by": "ranker", "users": [{"user": 1, "uzer": 2}]}, "'uzer' is no slot"),
    "times of others": ({"event_time": [1.0, 2.0]}, "must be a list of 1 numbers, one for each user"),
    "a long list": ({"rank_by": "ranker", "users": [{"user": [1] * 200_000}], "candidates": 30}, "6,000,000 values"),
}


@pytest.mark.parametrize("what", NOT_RANKED)
def test_what_cannot_be_ranked_is_refused_with_the_reason(ranked, what):
    asked, why = NOT_RANKED[what]
    assert why in ranked[0].refused(**{"users": [{"user": 3}], **asked})


def test_a_replica_whose_ranking_model_has_no_version_yet_says_so(tmp_path):
    served = ServedTowers(tmp_path, rankers=[CandidateRanker(ReplicaState(5, 1 << 30))]).learn(1)
    assert "no version of 'ranker' is loaded yet" in served.refused(503, users=[{"user": 3}], rank_by="ranker")
    assert ids(served.retrieve(users=[{"user": 3}], k=1)), "retrieval alone goes on"


def section(slot="item"):
    return RetrievalSection.model_validate({"items": {"slot": slot, "files": ["items.jsonl"]}})


def test_a_job_file_whose_model_has_no_such_items_is_refused():
    check_retrieval(section(), "two_tower", {"item": "item"})
    with pytest.raises(SpecError, match='model.name = "two_tower"'):
        check_retrieval(section(), "deepfm", {})
    with pytest.raises(SpecError, match="does not tell items apart") as refused:
        check_retrieval(section("kind"), "two_tower", {"item": ["item", "kind"]})
    assert refused.value.path == "retrieval.items.slot"


def test_python_gets_the_items_as_a_table(served):
    with Replica("http://127.0.0.1:8090", transport=Passed(served)) as replica:
        first = replica.retrieve([{"user": 3}, {"user": 1}], k=3, equal={"kind": "news"}, excluded=["i0"])
        wanted = served.job.best(3, lambda each: each["kind"] == ["news"] and each["item"] != "i0")
        assert first.version == "1" and first.items["user"].to_pylist() == [0] * 3 + [1] * 3
        assert first.items["item"].to_pylist()[:3] == [name for name, _ in wanted[:3]]
        later = replica.retrieve(
            [{"user": 3}, {"user": 1}], k=3, equal={"kind": "news"}, excluded=["i0"], cursor=first.cursor
        )
        assert later.items["item"].to_pylist()[:3] == [name for name, _ in wanted[3:6]]
        with pytest.raises(SpecError, match="did you mean 'user'"):
            replica.retrieve([{"usr": 3}])


class Passed(httpx.BaseTransport):
    """Requests to a replica without a process."""

    def __init__(self, served):
        self._served = served

    def handle_request(self, request):
        content = request.read()
        answer = self._served.ask(request.method, request.url.path, content=content)
        return httpx.Response(answer.status_code, content=answer.content)


def test_users_are_read_as_they_were_planned_or_refused(tmp_path):
    place = tmp_path / "users.jsonl"
    place.write_text('{"user": 1}\n{"user": 2}\n{"user": 3}\n')
    file = UsersFile.of(str(place))
    segments = plan_segments([file, file], 2)
    assert [len(lines) for _, _, lines in _read(segments)] == [2, 1, 2, 1], "a file may be named twice"
    for changed in (
        '{"user": 1}\n{"user": 2}\n{"user": 4}\n',
        '{"user": 1}\n{"user": 2}\n',
        place.read_text() + "{}\n",
    ):
        place.write_text(changed)
        with pytest.raises(UsersRefused, match="has changed since its parts were planned"):
            list(_read(segments))


class TellsLines:
    """Stands for an export that is searched."""

    schema = pa.schema([("offset", pa.int64())])

    def table(self, _path, at, users, _k):
        assert len(users) == len(at)
        return pa.table({"offset": at}, schema=self.schema)


def test_empty_lines_are_no_users_and_count_as_lines(tmp_path):
    place = tmp_path / "users.jsonl"
    place.write_text('\n{"user": 1}\n \n{"user": 2}\n\n')
    asked = BatchRetrieval(users=(str(place),), output=str(tmp_path / "out"))
    output, segments = PredictionOutput(asked.output, tmp_path / "stage"), plan_segments([UsersFile.of(str(place))], 2)
    output.work.mkdir(parents=True)
    retrieve_parts(output, segments, TellsLines(), asked, lambda: None, lambda: None)
    assert [mark.num_events for mark in output.marks(range(3)).values()] == [1, 1, 0]
    assert pq.read_table(tmp_path / "out")["offset"].to_pylist() == [1, 3]


def rows_of(job):
    """Finds the rows of a job, as an exporter does."""

    def find(_table, keys_U):
        known = {key(*row, GROUPS): values for row, values in job.rows.items()}
        found_U = np.array([int(each) in known for each in keys_U], np.bool_)
        rows = [known.get(int(each), np.zeros(5, np.float32)) for each in keys_U]
        return found_U, np.array(rows, np.float32).reshape(-1, 5)

    return find


def test_an_export_holds_the_items_that_a_replica_finds(tmp_path):
    served = ServedTowers(tmp_path, 6000).learn(1).learn(2, gone=("i5",))
    job, place, files = served.job, folder_destination(tmp_path / "out"), {}
    told = write_items(
        job.files, job.model, job.onnx, job.dense, rows_of(job), partial(_file, place, files), Deadline.after(60)
    )
    assert told == {"ok": True, "why": "", "items": 6000, "found": 5999, "dim": 3}
    place.put(MODEL, json.dumps(job.model).encode())
    manifest = {"name": "0000000002-base", "kind": "base", "version": 2, "tables": {}, "files": files}
    items = ExportedItems(index_in(ReadableExport(ExportFolder(str(tmp_path / "out"), tmp_path), manifest)), 2)
    users, asked = np.array([[1, 2, 3], [0, -1, 0.5]], np.float32), {"kind": ["news"]}
    assert items.vectors().tobytes() == served.state.items.index.vectors_IV.tobytes()
    found = items.search(users, 7, equal=asked, excluded=["i3"])
    assert found["user"].to_pylist() == [0] * 7 + [1] * 7 and "i3" not in found["item"].to_pylist()
    wanted = [each["item"] for each in job.items if each["kind"] == ["news"] and each["item"] not in ("i3", "i5")]
    scores = items.vectors()[[int(name[1:]) for name in wanted]] @ users[0]
    best = [wanted[at] for at in np.argsort(-scores, kind="stable")[:7]]
    assert found["item"].to_pylist()[:7] == best
    with pytest.raises(SpecError, match="the shape \\[1, 2\\]; \\(users, 3\\) is needed"):
        items.search([[1, 2]])
    for bad, k in (([["a", 2, 3]], 1), ([[1, 2, 3], [1]], 1), (users, 2.5)):
        with pytest.raises(SpecError, match="\\(users, 3\\) numbers, and k is a whole number"):
            items.search(bad, k)
    with pytest.raises(BadInput, match="items have no field 'colour'"):
        items.search(users, equal={"colour": 1})
    counted = {**job.model, "retrieval": {**job.model["retrieval"], "popularity": "counts"}}
    dense = {**job.dense, "counts": np.arange(128, dtype=np.float32).reshape(2, 64)}
    described = replace(job.whole(3), model=counted, dense=dense)
    told = write_items(
        job.files, counted, job.onnx, dense, rows_of(job), partial(_file, place, files), Deadline.after(60)
    )
    popular = index_in(ReadableExport(ExportFolder(str(tmp_path / "out"), tmp_path), manifest)).vectors_IV
    scratch = ReplicaState(5, 1 << 30, ItemIndexer())
    scratch.apply(described)
    assert scratch.items.index.vectors_IV.tobytes() == popular.tobytes() and told["dim"] == 3
    shares = log_shares(dense["counts"], scratch.items.index.catalogue.sign_I)
    assert np.array_equal(popular[:, -1], np.where(scratch.items.index.there_I, shares * np.float32(PART), 0))
    assert np.array_equal(popular[:, :-1], items.vectors()[:, :-1]) and len({*shares.tolist()}) > 1
    for bad in ({}, {"counts": np.zeros(64, np.float32)}, {"counts": np.full((2, 64), np.nan, np.float32)}):
        lacks = write_items(
            job.files, counted, job.onnx, job.dense | bad, rows_of(job), partial(_file, place, files), Deadline.after(9)
        )
        assert not lacks["ok"] and "the counts of items" in lacks["why"]
    job.catalogue.write_text("")
    nothing = write_items(
        job.files, job.model, job.onnx, job.dense, rows_of(job), partial(_file, place, files), Deadline.after(9)
    )
    assert not nothing["ok"] and "no item" in nothing["why"]
