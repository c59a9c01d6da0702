"""The wheel and the sdist: what they hold, and that a user has all of Headrace with the wheel alone."""

import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile

import pytest

import headrace
from headrace.service.spec.examples import EXAMPLES, examples
from tests import wheel as wheels
from tests.e2e.test_tutorial import LIMIT_S, TUTORIAL, followed
from tests.kafka.cluster import free_ports

pytestmark = pytest.mark.long
USERS = ("dataset", "pserver", "service", "trainer")
"""Files beside a user's generator that have the names of our top folders."""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return wheels.build(tmp_path_factory.mktemp("built"))


@pytest.fixture(scope="module")
def environment(built, tmp_path_factory):
    return wheels.install(built[1], tmp_path_factory.mktemp("wheel") / "environment")


def run(environment, folder, *words):
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "HEADRACE"))}
    command = [environment / "bin" / "headrace", *map(str, words)]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_installs_headrace_and_nothing_else(built):
    sdist, wheel = built
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"headrace", f"headrace-{headrace.__version__}.dist-info"}
    assert not [name for name in names if "/data/" in name or "__pycache__" in name]
    with tarfile.open(sdist) as archive:
        folders = {member.name.split("/")[1] for member in archive.getmembers() if member.name.count("/") > 1}
    assert folders == {"headrace", "headrace.egg-info"}
    wheels.ran(sys.executable, "-m", "twine", "check", "--strict", sdist, wheel)
    wheels.ran(sys.executable, "-m", "check_wheel_contents", wheel)


@pytest.mark.timeout(LIMIT_S + 60)
def test_the_demo_runs_from_the_wheel(environment, tmp_path):
    printed = run(environment, tmp_path, "demo", "--events", 4000, "--set", "sources.clicks.rate=0")
    assert "impressions joined with clicks that came minutes later" in printed
    report = tmp_path / "runs" / "demo" / "jobs" / "demo" / "store" / "report.json"
    assert json.loads(report.read_text())["events"] == 4000


def test_examples_are_copied_from_the_wheel_and_run(environment, tmp_path):
    assert re.findall(r"^(\w+) ", run(environment, tmp_path, "example"), re.M) == list(examples())
    run(environment, tmp_path, "example", "clicks", "mine")
    copied = {path.name for path in (tmp_path / "mine").iterdir()}
    assert copied == {path.name for path in (EXAMPLES / "clicks").iterdir() if path.name != "__pycache__"}
    words = ("--set", "sources.clicks.events=2000", "--set", "sources.clicks.rate=0")
    assert re.search(r"^events +2,000$", run(environment, tmp_path, "run", "mine/job.toml", *words), re.M)
    run(environment, tmp_path, "example", "monitoring")
    assert (tmp_path / "monitoring" / "prometheus" / "alerts.yml").exists()


@pytest.mark.kafka
@pytest.mark.timeout(LIMIT_S + 60)
def test_the_tutorial_leads_from_a_topic_to_a_served_model_beside_files_with_our_names(environment, kafka, tmp_path):
    (tmp_path / "tutorial").mkdir()
    for name in USERS:
        (tmp_path / "tutorial" / f"{name}.py").write_text("raise ImportError('a file of the user')\n")
    page = TUTORIAL.replace("localhost:9092", kafka.servers).replace(":8090", f":{free_ports(1)[0]}")
    page = page.replace('", "clicks"', '", "for_the_wheel"').replace('["clicks"]', '["for_the_wheel"]')
    output = followed(page, tmp_path, environment=environment)
    assert "20 events, 20 samples, 0 rejected" in output
    assert re.search(r"^events +20,000$", output, re.M), output
    likes, likes_not = (float(number) for number in re.findall(r"'prediction.ctr': ([\d.]+)", output))
    assert likes > likes_not
    first, second = (int(number) for number in re.findall(r'"model_version": "(\d+)"', output))
    assert second > first >= 1
