"""What is deployed holds together: compose file, image, what Prometheus reads and Grafana shows. Nothing is run."""

import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

import headrace
from headrace.service.auth.config import ANY_MORE
from headrace.service.jobs.config import load_service
from tests.goldens import METRIC_FILES, commands, metrics

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
README = (DEPLOY / "README.md").read_text()
PROMTOOL = shutil.which("promtool")
COMMANDS = commands()
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES = COMPOSE["services"]
SCRAPED = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())
RULES = [r for g in yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text())["groups"] for r in g["rules"]]
DASHBOARDS = {path.name: json.loads(path.read_text()) for path in sorted((DEPLOY / "grafana").glob("*.json"))}
every_service = pytest.mark.parametrize("name", SERVICES)
every_dashboard = pytest.mark.parametrize("dashboard", DASHBOARDS.values(), ids=DASHBOARDS)
every_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])


def mounts(service):
    """(source, target, options) of each volume of a service."""
    for text in service.get("volumes", ()):
        source, target, *options = text.split(":")
        yield source, target, options


# The compose file


@every_service
def test_what_a_service_names_is_there(name):
    service = SERVICES[name]
    assert set(service.get("depends_on", {})) <= set(SERVICES)
    network = service.get("network_mode", "")
    assert not network.startswith("service:") or network.removeprefix("service:") in SERVICES
    for source, _, options in mounts(service):
        if source.startswith("."):
            assert (ROOT / source).is_dir() and options == ["ro"], source
        else:
            assert source in COMPOSE["volumes"], source
    if build := service.get("build"):
        assert (ROOT / build["context"] / build["dockerfile"]).is_file()


def test_every_volume_is_used():
    assert {source for each in SERVICES.values() for source, _, _ in mounts(each)} >= set(COMPOSE["volumes"])


@every_service
def test_images_have_a_version(name):
    version = SERVICES[name]["image"].rpartition(":")[2]
    assert re.fullmatch(r"v?\d+\.\d+\.\d+", version), SERVICES[name]["image"]


@every_service
def test_nothing_is_published_beyond_this_machine(name):
    assert all(port.startswith("127.0.0.1:") for port in SERVICES[name].get("ports", ()))


@every_service
def test_what_stays_is_asked_whether_it_is_well(name):
    service = SERVICES[name]
    assert service.get("restart") == "no" or {"test", "interval", "timeout", "retries"} <= set(service["healthcheck"])


@every_service
def test_commands_of_the_image_are_headraces(name):
    service = SERVICES[name]
    if "build" in service and service.get("entrypoint", ["headrace"])[-1] == "headrace":
        command, *words = service["command"]
        options = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert options <= COMMANDS[command]


def test_the_service_finds_what_setup_makes_and_mounts():
    config = load_service(DEPLOY / "compose/service.toml")
    setup, service = (
        {target: source for source, target, _ in mounts(SERVICES[name])} for name in ("setup", "headrace")
    )
    assert setup[str(config.root)] == service[str(config.root)]
    assert config.tls.cert is not None and config.tls.key is not None
    for path in (config.tls.cert, config.tls.key):
        assert setup[str(path.parent)] == service[str(path.parent)]
        assert path.name in (DEPLOY / "compose/setup.sh").read_text()
    assert config.access.anonymous == "none" and not config.access.unprotected
    assert all(root in service for root in config.allow.roots)


def test_allowed_commands_run_programs_that_are_mounted_and_cannot_be_written():
    config = load_service(DEPLOY / "compose/service.toml")
    readable = {Path(target): ROOT / source for source, target, options in mounts(SERVICES["headrace"]) if options}
    for python, program, *more in config.allow.pipe_commands:
        (inside,) = [
            there / Path(program).relative_to(at) for at, there in readable.items() if at in Path(program).parents
        ]
        assert inside.is_file() and python == "python" and ANY_MORE not in more


def test_what_is_named_below_run_is_made_by_setup_and_mounted():
    made = (DEPLOY / "compose/setup.sh").read_text()
    texts = {name: json.dumps(service) for name, service in SERVICES.items() if name != "setup"}
    texts["prometheus"] += json.dumps(SCRAPED)
    for name, text in texts.items():
        for folder, file in re.findall(r"/run/headrace/(\w+)/([\w.]+)", text):
            assert any(target == f"/run/headrace/{folder}" for _, target, _ in mounts(SERVICES[name])), (
                f"{name}: {file}"
            )
            assert file in made


def test_the_image_is_built_of_what_is_let_in():
    let_in = set(re.findall(r"^!(\S+?)/?$", (ROOT / ".dockerignore").read_text(), re.M))
    assert {
        "headrace",
        "dataset",
        "pserver",
        "trainer",
        "service",
        "deploy",
        "pyproject.toml",
        "README.md",
        "LICENSE",
    } == let_in
    assert all((ROOT / name).exists() for name in let_in)
    text = (DEPLOY / "Dockerfile").read_text()
    assert text.index("\nUSER headrace\n") < text.index("\nENTRYPOINT")
    image = f"headrace:{headrace.__version__}"
    assert f" {image} " in text and SERVICES["headrace"]["image"] == image
    written = {
        at for name in ("headrace", "replica", "setup") for _, at, options in mounts(SERVICES[name]) if not options
    }
    assert [at for at in written if not re.search(rf"{at}\b", text)] == []  # their owner is the image's


def test_the_image_has_the_extra_that_the_readme_names():
    (extra,) = re.findall(r"headrace-\*\.whl\)\[(\w+)\]", (DEPLOY / "Dockerfile").read_text())
    (named,) = re.findall(r"with the extra `(\w+)`, for CPUs", (DEPLOY / "README.md").read_text())
    assert extra == named == "all"
    assert extra in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


# Expressions name what there is


def known_metrics():
    """Every name that may stand in an expression, with the labels it may have."""
    known = {"up": {"job", "instance"}}
    for file in METRIC_FILES:
        for metric in metrics(file):
            labels = set(metric.labels)
            if file == "replica_metrics.txt" and "job" in labels:  # Prometheus has a "job" of its own there
                labels = labels - {"job"} | {"exported_job"}
            suffixes = ("_bucket", "_sum", "_count") if metric.kind == "histogram" else ("",)
            known |= {metric.name + suffix: {*labels, "instance", "job"} for suffix in suffixes}
            if metric.kind == "histogram":
                known[f"{metric.name}_bucket"].add("le")
    return known


KNOWN = known_metrics()
WORDS = {"and", "or", "unless", "by", "on", "without", "ignoring", "group_left", "group_right"}
FUNCTIONS = {"rate", "increase", "delta", "deriv", "changes", "sum", "max", "histogram_quantile", "label_values"}


def trouble(expression):
    """What an expression names that there is not: a small reader of PromQL, of names alone."""
    text = re.sub(r"\b(?:by|on|without|ignoring|group_left|group_right) *\([\w, ]*\)", " ", expression)
    if match := re.fullmatch(r"label_values\((.*), (\w+)\)", text):
        text = f"{match[1]}{{{match[2]}=~'.*'}}"
    for name, _, matchers in re.findall(r"(\w+)(\{([^}]*)\})", text):
        yield from (
            f"{name} has no label {label}"
            for label in re.findall(r"(\w+) *[=!]", matchers)
            if label not in KNOWN.get(name, ())
        )
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]", " ", text)
    for name, called in re.findall(r"\b([A-Za-z_]\w*)\b( *\()?", bare):
        if name not in (FUNCTIONS if called else KNOWN.keys() | WORDS) and not (called and name in WORDS):
            yield f"there is no {name}"


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("rate(headrace_events_total[5m]) > 0", []),
        ("rate(headrace_events[5m])", ["there is no headrace_events"]),
        ('headrace_state{sate="failed"}', ["headrace_state has no label sate"]),
        ("headrace_replica_request_seconds", ["there is no headrace_replica_request_seconds"]),
        ("rat(up[5m]) and on (job) headrace_forked", ["there is no rat"]),
        ("label_values(headrace_state, jobb)", ["headrace_state has no label jobb"]),
    ],
)
def test_the_reader_of_expressions_finds_what_is_wrong(expression, said):
    assert list(trouble(expression)) == said


@every_rule
def test_an_alert_is_about_metrics_there_are_and_says_what_to_do(rule):
    assert list(trouble(rule["expr"])) == []
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert len(rule["annotations"]["summary"]) > 20 and len(rule["annotations"]["action"]) > 40
    assert set(re.findall(r"headrace_\w+", " ".join(rule["annotations"].values()))) <= set(KNOWN)
    said = re.findall(r"`headrace ([a-z -]+)`", rule["annotations"]["action"])
    assert [words for words in said if words not in COMMANDS and words.split()[0] not in COMMANDS] == []


def test_every_figure_that_is_an_alarm_has_its_alert():
    said = " ".join(rule["expr"] for rule in RULES)
    alarms = {"headrace_commit_failing", "headrace_trouble", "headrace_stalled", "headrace_forked"}
    alarms |= {"headrace_export_failing"}
    ages = {
        name for name in KNOWN if name.startswith("headrace") and re.search(r"_age_seconds$|_behind_seconds$", name)
    }
    ages -= {"headrace_replica_version_age_seconds"}  # old where no pass is closed, which is told of otherwise
    assert [name for name in sorted(alarms | ages) if name not in said] == []


def test_alerts_have_names_of_their_own():
    assert len({rule["alert"] for rule in RULES}) == len(RULES)


def test_what_is_scraped_is_what_compose_runs():
    assert all((DEPLOY / "prometheus" / name).is_file() for name in SCRAPED["rule_files"])
    ports = {port.rsplit(":", 1)[1] for port in SERVICES["headrace"]["ports"]}
    for scrape in SCRAPED["scrape_configs"]:
        for target in scrape["static_configs"][0]["targets"]:
            host, _, port = target.partition(":")
            assert host in SERVICES and port in ports
    assert {s["job_name"]: s.get("honor_labels", False) for s in SCRAPED["scrape_configs"]} == {
        "headrace": True,
        "replica": False,
    }


# Dashboards


@every_dashboard
def test_every_panel_shows_metrics_there_are_in_a_unit(dashboard):
    for panel in dashboard["panels"]:
        if panel["type"] == "row":
            continue
        assert panel["targets"] and panel["description"], panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        for each in (panel, *panel["targets"]):
            assert each["datasource"] == {"type": "prometheus", "uid": "prometheus"}
        for target in panel["targets"]:
            assert list(trouble(target["expr"])) == [], panel["title"]


@every_dashboard
def test_variables_are_asked_of_metrics_there_are_and_used(dashboard):
    shown = json.dumps(dashboard["panels"])
    for variable in dashboard["templating"]["list"]:
        assert list(trouble(variable["query"]["query"])) == []
        assert f"${variable['name']}" in shown
    assert set(re.findall(r"\$(\w+)", shown)) == {variable["name"] for variable in dashboard["templating"]["list"]}


@every_dashboard
def test_panels_lie_beside_each_other(dashboard):
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in dashboard["panels"])
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells)) and all(x < 24 for x, _ in cells)
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def test_dashboards_are_found_and_find_each_other():
    (source,) = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yml").read_text())["datasources"]
    assert source["uid"] == "prometheus" and source["url"].split("/")[2].partition(":")[0] in SERVICES
    (provider,) = yaml.safe_load((DEPLOY / "grafana/provisioning/dashboards/headrace.yml").read_text())["providers"]
    assert ("./deploy/grafana", provider["options"]["path"], ["ro"]) in mounts(SERVICES["grafana"])
    uids = {dashboard["uid"] for dashboard in DASHBOARDS.values()}
    links = {link["url"] for dashboard in DASHBOARDS.values() for link in dashboard["links"]}
    assert len(uids) == 2 and links == {f"/d/{uid}" for uid in uids}


def test_every_figure_is_on_a_dashboard():
    shown = json.dumps(list(DASHBOARDS.values()))
    silent = {"headrace_pass", "headrace_events_per_second", "headrace_samples_per_second"}  # shown from the counters
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in KNOWN if name != "up"} - silent
    assert [name for name in sorted(families) if name not in shown] == []


def test_alerts_are_listed_by_how_urgent_they_are():
    listed = re.findall(r"^\| \w+ \| ((?:[A-Z]\w+(?:, )?)+|-) \| ((?:[A-Z]\w+(?:, )?)+|-) \|$", README, re.M)
    for column, severity in enumerate(("critical", "warning")):
        told = [name for row in listed for name in row[column].split(", ") if name != "-"]
        assert told == [
            rule["alert"].removeprefix("Headrace") for rule in RULES if rule["labels"]["severity"] == severity
        ]


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not there (Debian's package prometheus has it)")
def test_prometheus_takes_its_configuration_and_rules():
    for words in (("check", "config", "--syntax-only", "prometheus.yml"), ("check", "rules", "alerts.yml")):
        done = subprocess.run([PROMTOOL, *words], cwd=DEPLOY / "prometheus", capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr
