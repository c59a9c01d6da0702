"""Rules for specs over the API: commands, models, brokers, folders; every key that can hold text has a rule."""

import contextlib
import time
import tomllib
import typing
from pathlib import Path

import pytest
from pydantic import BaseModel

from headrace.config import Section, validate
from headrace.errors import SpecError
from headrace.secrets import without_secrets
from headrace.service.api.jobs import CreateJob
from headrace.service.auth.config import AllowSection
from headrace.service.auth.spec_rules import SpecRules, check_spec, declares_text, held, holds_text
from headrace.service.auth.spec_sizes import check_size
from headrace.service.spec.job import JobFile, LoadedJob, job_of
from headrace.text_kinds import TextKind
from headrace.trainer.config import ModelSection
from headrace.trainer.models.contract import Shape, SlotShape
from headrace.trainer.models.registry import MODELS, check_section
from tests.fakes.model_settings import MODEL_NAMES
from tests.integration.stream_job import SPEC

FILES = {"kind": "files", "paths": ["events/*.jsonl"]}
KAFKA = {"kind": "kafka", "topics": ["news"], "options": {"bootstrap_servers": "broker:9092"}}


@pytest.fixture
def place(tmp_path):
    """An allowed root with the service's own folder below it, and a folder that is nobody's business."""
    for name in ("data/team/events", "data/headrace/jobs/news", "data/headrace/jobs/other", "elsewhere"):
        (tmp_path / name).mkdir(parents=True)
    return tmp_path


@pytest.fixture
def check(place):
    """Check a spec: the usual one, with the sections given in place of its own."""

    def checked(allow=None, base="data/headrace/jobs/news", **sections):
        raw = {
            "name": "news",
            "sources": {"main": {"kind": "simulated", "events": 10}},
            "pipe": {"command": ["python", "generator.py"]},
            "slots": [{"name": "C1"}, {"name": "label", "kind": "meta"}],
            "tasks": [{"name": "ctr", "label": "label"}],
            "model": {"name": "deepfm"},
            "store": {"path": "store"},
            **sections,
        }
        rules = {
            "pipe_commands": [["python", "generator.py"]],
            "roots": [str(place / "data"), "s3://bucket/team?region=eu-north-1", "az://bucket/team?account=ours"],
            **(allow or {}),
        }
        folder, spec = place / base, validate(JobFile, raw)
        job = LoadedJob(spec=spec, raw=raw, folder=folder, store=folder / spec.store.path)
        own, service = place / "data/headrace/jobs/news", place / "data/headrace"
        check_spec(job, validate(AllowSection, rules), own, private=(service,))

    return checked


def refused(check, **given):
    with pytest.raises(SpecError) as caught:
        check(**given)
    return str(caught.value)


def test_a_job_opens_ports_at_listed_interfaces_alone(check):
    cluster = {"interface": "eth0", "trust_interface": True}
    told = "'eth0' opens a port to other machines, and is not allowed here; allowed: none (allow.interfaces)"
    assert told in refused(check, cluster=cluster)
    check(cluster=cluster, allow={"interfaces": ["eth0"]})
    assert "eth1" in refused(check, cluster={**cluster, "interface": "eth1"}, allow={"interfaces": ["eth0"]})
    check(cluster={"interface": "lo"})


def test_a_job_lets_workers_join_at_loopback_and_at_listed_addresses(check):
    for listen in ("127.0.0.1:7070", "[::1]:7070", "localhost:0"):
        check(cluster={"listen": listen})
    cluster, interfaces = {"interface": "eth0", "trust_interface": True, "listen": "[fd00::1]:7070"}, ["eth0"]
    told = "cluster.listen: '[fd00::1]:7070' opens a port to other machines, and is not allowed here; allowed: eth0 ("
    assert told in refused(check, cluster=cluster, allow={"interfaces": interfaces})
    check(cluster=cluster, allow={"interfaces": [*interfaces, "[fd00::1]:7070"]})


def test_what_is_allowed_passes(check, place):
    check()
    check(base="data/team", sources={"main": FILES})
    check(base="data/team", sources={"main": {**FILES, "root": "s3://bucket/team/clicks?region=eu-north-1"}})
    check(store={"path": str(place / "data/team/store"), "mirror": "s3://bucket/team/news?region=eu-north-1"})
    check(store={"path": "store", "mirror": "abfss://bucket@ours.dfs.core.windows.net/team/news"})
    check(exports={"hourly": {"path": f"file://{place}/data/team/exports"}, "daily": {}})


@pytest.mark.parametrize(
    "words",
    [
        ["bash", "-c", "id"],
        ["python", "generator.py", "--more"],
        ["python"],
        ["python", "-c", "import os"],
        ["/usr/bin/python", "generator.py"],
        ["python", "./generator.py"],
        ["python generator.py"],
    ],
)
def test_a_command_that_is_not_word_for_word_an_allowed_one_is_refused_and_told_them(check, words):
    told = refused(check, pipe={"command": words})
    assert told.startswith("pipe.command: ")
    assert "allowed: python generator.py (allow.pipe_commands)" in told


def test_dots_at_the_end_of_an_allowed_command_let_any_arguments_follow(check):
    allow = {"pipe_commands": [["python", "generator.py", "..."]]}
    check(allow, pipe={"command": ["python", "generator.py"]})
    check(allow, pipe={"command": ["python", "generator.py", "--days", "3"]})
    assert "allowed: python generator.py ..." in refused(check, allow=allow, pipe={"command": ["python", "other.py"]})
    with pytest.raises(SpecError, match="may only be the last word"):
        check({"pipe_commands": [["...", "x"]]})


def test_without_allowed_commands_none_is(check):
    assert "allowed: none" in refused(check, allow={"pipe_commands": []})
    told = refused(check, exports={"hourly": {"command": ["curl", "http://evil"]}})
    assert told.startswith("exports.hourly.command: ") and "allowed: none (allow.export_commands)" in told
    check({"export_commands": [["notify"]]}, exports={"hourly": {"command": ["notify"]}})


def test_a_class_of_the_users_is_refused_unless_named_and_a_model_that_is_not_named_is_too(check):
    own = {"class": "evil:Model"}
    assert refused(check, model=own).startswith("model.class: 'evil:Model' is not allowed here; allowed: lr, fm, ")
    check({"models": ["evil:Model"]}, model=own)
    assert "model.name: 'deepfm' is not allowed" in refused(check, allow={"models": ["lr"]})


def test_a_metric_of_the_users_is_refused_unless_named(check):
    metrics = {"own": ["evil:Metric"]}
    told = refused(check, metrics=metrics)
    assert told.startswith(
        "metrics.own.0: 'evil:Metric' is not allowed here; allowed: expected_calibration_error (allow.metrics)"
    )
    check({"metrics": ["evil:Metric"]}, metrics=metrics)


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"store": {"path": "/etc"}}, "store.path"),
        ({"store": {"path": "../other"}}, "store.path"),
        ({"store": {"path": "a/../../other"}}, "store.path"),
        ({"store": {"path": "store\0"}}, "store.path"),
        ({"store": {"path": ""}}, "store.path"),
        ({"store": {"path": "x", "mirror": "/var/mirror"}}, "store.mirror"),
        ({"store": {"path": "x", "mirror": "~/mirror"}}, "store.mirror"),
        ({"store": {"path": "x", "mirror": "file:///etc"}}, "store.mirror"),
        ({"store": {"path": "x", "mirror": "file:///data/%2e%2e/etc"}}, "store.mirror"),
        ({"store": {"path": "x", "mirror": "s3://bucket/team-two?region=eu-north-1"}}, "store.mirror"),
        ({"store": {"path": "x", "mirror": "s3://bucket?region=eu-north-1"}}, "store.mirror"),
        ({"store": {"path": "x", "mirror": "s3://bucket/team/../x?region=eu-north-1"}}, "store.mirror"),
        ({"store": {"path": "x", "mirror": "s3://bucket/team/%2e%2e/x?region=eu-north-1"}}, "store.mirror"),
        ({"store": {"path": "x", "mirror": "s3://bucket/team//x?region=eu-north-1"}}, "store.mirror"),
        ({"store": {"path": "x", "mirror": "s3://other/team?region=eu-north-1"}}, "store.mirror"),
        ({"store": {"path": "x", "mirror": "s3://bucket/team?endpoint_override=evil:1"}}, "store.mirror"),
        ({"store": {"path": "x", "mirror": "gs://bucket/team"}}, "store.mirror"),
        ({"store": {"path": "x", "mirror": "az://bucket/team?account=theirs"}}, "store.mirror"),
        ({"store": {"path": "x", "mirror": "az://bucket/team?account=ours&endpoint_override=evil:1"}}, "store.mirror"),
        ({"store": {"path": "x", "mirror": "abfss://bucket@ours.dfs.core.windows.net/%2e%2e/x"}}, "store.mirror"),
        ({"sources": {"main": {**FILES, "root": "s3://other/team?region=eu-north-1"}}}, "sources.main.root"),
        ({"sources": {"main": {**FILES, "root": "s3://bucket/team?endpoint_override=evil:1"}}}, "sources.main.root"),
        ({"sources": {"main": {**FILES, "after": "../x"}}}, "sources.main.after"),
        ({"exports": {"hourly": {"path": "/srv"}}}, "exports.hourly.path"),
        ({"sources": {"main": {**FILES, "paths": ["ok/*", "/etc/pass*"]}}}, "sources.main.paths.1"),
        ({"sources": {"main": {**FILES, "paths": ["/*/passwd"]}}}, "sources.main.paths.0"),
        ({"sources": {"main": {**FILES, "paths": ["../*.json"]}}}, "sources.main.paths.0"),
        ({"sources": {"main": {**FILES, "paths": ["/proc/self/environ"]}}}, "sources.main.paths.0"),
        ({"sources": {"main": {**FILES, "ready": "../../x"}}}, "sources.main.ready"),
        ({"sources": {"main": {**KAFKA, "options": {"ssl_cafile": "/etc/ssl/x"}}}}, "sources.main.options.ssl_cafile"),
        ({"sources": {"main": {**KAFKA, "options": {"proxy_url": "http://x"}}}}, "sources.main.options.proxy_url"),
        ({"tables": {"../../x": {}}}, "tables"),
        ({"tables": {"..": {}}}, "tables"),
        ({"sources": {"a/b": KAFKA}}, "sources"),
        ({"slots": [{"name": "a/b"}, {"name": "label", "kind": "meta"}]}, "slots.0"),
        ({"slots": [{"names": ["C1", "x\n"]}, {"name": "label", "kind": "meta"}]}, "slots.0"),
        ({"tasks": [{"name": "x" * 129, "label": "label"}]}, "tasks.0.name"),
    ],
)
def test_what_leads_out_is_refused_at_its_key(check, sections, key):
    assert refused(check, **sections).startswith(f"{key}: ")


def test_a_link_that_leads_out_is_refused_and_one_that_stays_within_is_not(check, place):
    (place / "data/out").symlink_to(place / "elsewhere")
    (place / "data/circle").symlink_to(place / "data/circle")
    (place / "data/in").symlink_to(place / "data/team")
    (place / "data/headrace/jobs/news/out").symlink_to(place / "elsewhere")
    for path in ("out", "out/below", "circle"):
        assert "store.path" in refused(check, store={"path": str(place / "data" / path)})
    assert "it leads to" in refused(check, store={"path": str(place / "data/out")})
    assert "store.path" in refused(check, store={"path": "out/x"})
    assert "base" in refused(check, base="data/out")
    check(store={"path": str(place / "data/in/store")})


def test_a_link_to_a_root_from_elsewhere_is_refused_as_whoever_made_it_may_change_it(check, place):
    (place / "elsewhere/link").symlink_to(place / "data")
    assert "store.path" in refused(check, store={"path": str(place / "elsewhere/link/x")})


def test_a_root_that_is_a_link_itself_may_be_named_either_way(check, place):
    (place / "root").symlink_to(place / "data")
    for path in ("root/team/x", "data/team/x"):
        check({"roots": [str(place / "root")]}, store={"path": str(place / path)})


def test_a_file_that_a_pattern_matches_may_not_be_a_link_out(check, place):
    (place / "elsewhere/secret").write_text("x")
    (place / "data/team/events/a.jsonl").symlink_to(place / "elsewhere/secret")
    told = refused(check, base="data/team", sources={"main": FILES})
    assert told.startswith("sources.main.paths.0: ") and "it leads to" in told


@pytest.mark.parametrize("path", ["data/headrace", "data/headrace/records.db", "data/headrace/jobs/other", "data"])
def test_the_services_own_folder_and_other_jobs_are_reached_by_no_spec(check, place, path):
    assert "the service's own" in refused(check, store={"path": str(place / path)})


def test_a_pattern_that_could_match_the_services_own_is_refused(check, place):
    for pattern in (f"{place}/data/**/*.db", f"{place}/data/h*/records.db", f"{place}/data/{{team}}/x"):
        assert "the service's own" in refused(check, sources={"main": {**FILES, "paths": [pattern]}})


@pytest.mark.parametrize("root", ["", "ftp://x", "s3://", "s3://key:secret@bucket/x", "/", "file:///"])
def test_a_root_that_is_no_place_or_is_everything_is_refused_by_the_configuration(root):
    with pytest.raises(SpecError, match="^roots"):
        validate(AllowSection, {"roots": [root]})


def test_brokers_are_those_named_and_the_services_credentials_are_for_them_alone(check):
    check(sources={"main": KAFKA})
    check({"bootstrap_servers": ["broker:9092"]}, sources={"main": KAFKA})
    several = {**KAFKA, "options": {"bootstrap_servers": "broker:9092,evil:9092"}}
    listed = {**KAFKA, "options": {"bootstrap_servers": ["broker:9092", "evil:9092"]}}
    for source in (several, listed):
        told = refused(check, allow={"bootstrap_servers": ["broker:9092"]}, sources={"main": source})
        assert "sources.main.options.bootstrap_servers: 'evil:9092' is not allowed" in told
    iam = {**KAFKA, "options": {**KAFKA["options"], "sasl_mechanism": "AWS_MSK_IAM"}}
    assert "allow.bootstrap_servers" in refused(check, sources={"main": iam})
    check({"bootstrap_servers": ["broker:9092"]}, sources={"main": iam})


def sections_of(annotation, found):
    """All sections that an annotation names, however deep."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        if annotation not in found:
            found.append(annotation)
            for field in annotation.model_fields.values():
                sections_of(field.annotation, found)
    for part in typing.get_args(annotation):
        sections_of(part, found)
    return found


def test_every_key_that_can_hold_text_is_known_for_what_it_holds():
    sections = sections_of(JobFile, [])
    texts = [(owner, name) for owner in sections for name in owner.model_fields if declares_text(owner, name)]
    assert len(texts) > 30
    assert [f"{owner.__name__}.{name}" for owner, name in texts if held(owner, name) is None] == []


def test_settings_of_our_own_models_hold_no_text_but_names_of_slots_that_are_there():
    sequence = SlotShape("q", 4, True, 3)
    shape = Shape((SlotShape("s", 4, True),), (sequence,), (("d", 2),), ("ctr", "ctcvr"))
    for name in MODEL_NAMES:
        settings_class = MODELS.load(name)
        for owner in sections_of(settings_class, []):
            texts = [key for key in owner.model_fields if declares_text(owner, key)]
            assert not texts or owner is settings_class
            for key in texts:
                given = {"target": "s", "item": ["s"], "sequence": "q", key: "../secret"}
                settings = {each: value for each, value in given.items() if each in owner.model_fields}
                with pytest.raises(SpecError, match=f"^model.settings.{key}: '../secret' is no"):
                    check_section(ModelSection(name=name, settings=settings), shape)


def test_a_key_that_nobody_has_told_of_is_refused_once_it_is_set(place):
    class Newcomer(Section):
        script: str | None = None

    class Deep(Section):
        parts: dict[str, tuple[Newcomer, ...]] = {}

    rules = SpecRules(AllowSection(), place)
    rules.check(Deep(parts={"a": (Newcomer(),)}), place)
    with pytest.raises(SpecError, match=r"^parts.a.0.script: cannot be set through the service"):
        rules.check(Deep(parts={"a": (Newcomer(script="x"),)}), place)


@pytest.mark.parametrize(
    ("annotation", "text"),
    [
        (str, True),
        (str | None, True),
        (tuple[str, ...], True),
        (dict[str, typing.Any], True),
        (typing.Annotated[Path, 1] | None, True),
        (list[dict[str, list[str]]], True),
        (dict[str, int], False),
        (typing.Literal["a", "b"] | None, False),
        (TextKind, False),
        (tuple[int, float], False),
    ],
)
def test_which_declarations_can_hold_text(annotation, text):
    assert holds_text(annotation) is text


def test_every_kind_of_text_is_checked(place):
    """A kind that the check does not handle would raise, or let anything pass."""
    rules = SpecRules(AllowSection(), place)
    wrong = {
        TextKind.NAME: "a/b",
        TextKind.FOLDER: "/etc",
        TextKind.BASE: "/etc",
        TextKind.PLACE: "s3://x/y",
        TextKind.VERSION: "s3://x/y",
        TextKind.PATTERNS: ("/etc/*",),
        TextKind.NETWORK: "eth0",
        TextKind.RAY_CLUSTER: "127.0.0.1:6379",
        TextKind.PIPE_COMMAND: ("sh",),
        TextKind.EXPORT_COMMAND: ("sh",),
        TextKind.MODEL: "a:B",
        TextKind.METRIC: ("a:B",),
        TextKind.KAFKA_OPTIONS: {"ssl_cafile": "/etc/x"},
        TextKind.REGISTRY: "http://registry",
        TextKind.SECRET: {"env": "HOME"},
    }
    assert set(TextKind) - set(wrong) == {TextKind.MODEL_SETTINGS, TextKind.SPEC, TextKind.VALUE}
    for holds, value in wrong.items():
        with pytest.raises(SpecError):
            rules._check(holds, value, place, "key")


def nested(depth):
    raw = {}
    for _ in range(depth):
        raw = {"a": [raw]}
    return raw


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        ({"x": "a" * (1 << 20)}, "at most 1048576"),
        (nested(50_000), "more than 24 deep"),
        ({"x": [0] * 60_000}, "more than 50000 values"),
        ({"slots": [{"name": "C{1..10000}"}] * 3}, "slots: 30000 are more"),
        ({"slots": [{"names": ["C{99999999990000..99999999999999}"] * 3}]}, "slots: 30000 are more"),
        ({"tables": {f"t{n}": {} for n in range(257)}}, "tables: 257 are more"),
        ({"exports": {f"t{n}": {} for n in range(17)}}, "exports: 17 are more"),
        ({"tasks": [{}] * 65}, "tasks: 65 are more"),
        ({"cluster": {"trainers": 64, "shards": 64}}, "cluster: 128 are more"),
        ({"cluster": {"trainers": 32, "shards": 1, "readers": 32}}, "cluster: 65 are more"),
        ({"cluster": {"trainers": {"min": 1, "max": 64}, "shards": 1}}, "cluster: 65 are more"),
    ],
)
def test_a_spec_larger_than_any_that_is_meant_is_refused_before_it_is_read(raw, told):
    with pytest.raises(SpecError) as caught:
        check_size(raw)
    assert told in str(caught.value)


def test_a_spec_of_strange_shape_is_left_to_those_who_know_it():
    for raw in ({}, {"slots": 3, "tables": "x", "cluster": [], "tasks": None}, {"slots": [1, {"names": 2}, {}]}):
        check_size(raw)


def test_nobody_is_shown_a_password():
    raw = {"sources": {"k": {"options": {"sasl_plain_password": "p", "retries": 1}}}, "list": [{"ssl_password": "p"}]}
    shown = without_secrets(raw)
    assert shown["sources"]["k"]["options"] == {"sasl_plain_password": "***", "retries": 1}
    assert shown["list"] == [{"ssl_password": "***"}]
    assert raw["list"] == [{"ssl_password": "p"}]


def seconds(act) -> float:
    began_s = time.process_time()
    with contextlib.suppress(SpecError):
        act()
    return time.process_time() - began_s


@pytest.mark.parametrize(
    "sections",
    [
        {"slots": [{"name": f"s{number}"} for number in range(19_000)]},
        {"slots": [{"names": []} for _ in range(19_000)]},
        {f"k{number}": 1 for number in range(20_000)},
        {"x" * 900_000: 1},
        {"train": {"learn" * 10 + str(number): 1 for number in range(14_000)}},
    ],
    ids=["slots", "empty lists", "unknown keys", "a long key", "keys alike"],
)
def test_a_spec_within_the_bounds_is_checked_in_a_time_that_does_not_grow_as_its_square(sections, tmp_path):
    assert seconds(lambda: job_of({**tomllib.loads(SPEC), **sections}, tmp_path)) < 10


@pytest.mark.parametrize("toml", ["a" + ".a" * 400_000 + " = 1", "[a" + ".a" * 400_000 + "]"])
def test_a_key_of_countless_parts_is_refused_before_it_is_read(toml):
    with pytest.raises(SpecError, match=r"toml: too many dots up to line 1"):
        CreateJob(toml=toml).raw()


def test_keys_of_as_many_parts_as_there_may_be_are_read_in_a_bounded_time():
    toml = "\n".join(f"a{number}{'.a' * 1_000} = 1" for number in range(4))
    assert seconds(lambda: CreateJob(toml=toml).raw()) < 10


def test_of_many_mistakes_some_are_told():
    with pytest.raises(SpecError) as caught:
        job_of({**tomllib.loads(SPEC), **{f"k{number}": 1 for number in range(50)}}, Path("/nowhere"))
    lines = str(caught.value).splitlines()
    assert len(lines) == 21 and lines[-1] == "and 30 more"
