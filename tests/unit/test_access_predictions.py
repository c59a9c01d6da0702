"""Rules for predictions over the API, which are stricter than those for specs."""

import pytest

from headrace.config import validate
from headrace.errors import SpecError
from headrace.service.auth.allowed_paths import reserved_by_jobs
from headrace.service.auth.config import AllowSection
from headrace.service.auth.spec_rules import SpecRules, declares_text, held
from headrace.service.spec.job import JobFile
from headrace.trainer.predict.config import PredictionRequest
from tests.unit.test_access_allowed import sections_of


def test_a_prediction_is_held_to_the_same(tmp_path):
    place, own = tmp_path, tmp_path / "data/headrace/jobs/news"
    own.mkdir(parents=True)
    rules = SpecRules(AllowSection(roots=(str(place / "data"),)), own, (place / "data/headrace",))
    for keys, key in [
        ({"output": "/etc"}, "output"),
        ({"output": "x", "version": "s3://bucket/x"}, "version"),
        ({"output": "x", "version": "../other/exports"}, "version"),
        ({"output": "x", "input": {"paths": ["/etc/*"]}}, "input.paths.0"),
        ({"output": "x", "columns": ["a/b"]}, "columns"),
        ({"output": "x", "base": "/"}, "base"),
    ]:
        request = validate(PredictionRequest, {"input": {"paths": ["held-out.jsonl"]}, **keys})
        with pytest.raises(SpecError, match=f"^{key}: "):
            rules.check(request, own)
    fine = {"input": {"paths": ["held-out.jsonl"]}, "output": str(place / "data/team/out"), "version": "live"}
    rules.check(validate(PredictionRequest, fine), own)


def test_a_prediction_in_an_object_store_reaches_no_mirror_and_no_exports_of_a_job(tmp_path):
    raw = {"store": {"mirror": "s3://bucket/mirrors/a"}, "exports": {"main": {"path": "s3://bucket/exports"}}}
    reserved = reserved_by_jobs([("a", raw, tmp_path, tmp_path / "store")])
    rules = SpecRules(AllowSection(roots=("s3://bucket",)), tmp_path, (), reserved)

    def check(**keys):
        request = {"input": {"paths": ["held-out.jsonl"], "root": keys.pop("root", None)}, "output": "out", **keys}
        rules.check(validate(PredictionRequest, request), tmp_path)

    check(output="s3://bucket/predicted")
    check(output="s3://bucket/exports/b")
    check(version="s3://bucket/exports/a/t1/0000000001-base")
    for place in ("mirrors/a", "mirrors/a/b", "mirrors", "exports/a", "exports"):
        with pytest.raises(SpecError, match=r"^output: .*would reach s3://bucket/.*, which belongs to a job"):
            check(output=f"s3://bucket/{place}")
    with pytest.raises(SpecError, match=r"^input.root: .*which belongs to a job"):
        check(root="s3://bucket/mirrors/a")
    with pytest.raises(SpecError, match=r"^output: .*outside of the allowed paths"):
        check(output="s3://other/predicted")


def test_a_prediction_of_a_topic_names_no_other_brokers_than_allowed_and_need_not_name_any(tmp_path):
    rules = SpecRules(AllowSection(roots=(str(tmp_path),), bootstrap_servers=("broker:9092",)), tmp_path)

    def check(**options):
        asked = {"input": {"kafka": {"topic": "news", "options": options}}, "output": str(tmp_path / "x")}
        rules.check(validate(PredictionRequest, asked), tmp_path)

    check()  # it has its job's
    check(client_id="me")
    check(bootstrap_servers="broker:9092")
    for servers in ("evil:9092", ["broker:9092", "evil:9092"], None):
        with pytest.raises(SpecError, match="^input.kafka.options.bootstrap_servers: "):
            check(bootstrap_servers=servers)


def test_every_key_of_a_request_that_can_hold_text_is_known_for_what_it_holds():
    sections = sections_of(PredictionRequest, [])
    texts = [(owner, name) for owner in sections for name in owner.model_fields if declares_text(owner, name)]
    assert len(texts) >= 8
    assert [f"{owner.__name__}.{name}" for owner, name in texts if held(owner, name) is None] == []


def test_no_section_says_the_kind_of_text_of_what_is_no_key():
    sections = [*sections_of(JobFile, []), *sections_of(PredictionRequest, [])]
    for owner in {base for section in sections for base in section.__mro__ if "holds" in vars(base)}:
        assert vars(owner)["holds"].keys() <= owner.model_fields.keys()
