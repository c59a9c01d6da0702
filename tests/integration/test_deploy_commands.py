"""What docker-compose.yml has containers do, done without containers: setup, service, submit, replica."""

import json
import os
import re
import shlex
import shutil
import ssl
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import typer
import yaml

from headrace.config import load_toml
from headrace.service.auth.roles import Role
from headrace.service.auth.token_store import StoredTokens
from headrace.service.auth.tokens import Tokens
from headrace.service.cli import main
from headrace.service.jobs.config import load_service
from headrace.service.records.database import opened
from tests.integration.hosted_service import HostedService

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
SERVICES = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]


@pytest.fixture
def moved(tmp_path):
    """Paths of the containers, in any text, as they are here."""
    places = {"/var/lib/headrace": "root", "/run/headrace": "run", "/srv/data": "data"}
    for name in ("run/tls", "run/following", "run/scraping", "run/watching", "data"):
        (tmp_path / name).mkdir(parents=True)

    def moved_text(text):
        for place, name in places.items():
            text = text.replace(place, str(tmp_path / name))
        return text.replace("/srv/examples", str(DEPLOY / "examples"))

    return moved_text


@pytest.fixture
def service(tmp_path, moved):
    config = moved((DEPLOY / "compose/service.toml").read_text())
    assert 'listen = "0.0.0.0:8080"' in config
    service = HostedService(tmp_path, config.replace("0.0.0.0:8080", "127.0.0.1:0"))
    yield service
    service.clean_up()


def set_up(folder):
    """Run setup.sh, with the `headrace` of this interpreter; what is below /run/headrace then."""
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    (programs / "headrace").write_text(f'#!/bin/sh\ncd "{ROOT}" && exec "{sys.executable}" -m headrace.service "$@"\n')
    (programs / "headrace").chmod(0o755)
    known = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}
    known |= {"CONFIG": str(folder / "service.toml"), "RUN": str(folder / "run")}
    subprocess.run(["sh", str(DEPLOY / "compose/setup.sh")], env=known, check=True, stdout=subprocess.PIPE, timeout=240)
    return {path: path.read_bytes() for path in sorted((folder / "run").rglob("*")) if path.is_file()}


def submitted(moved):
    """The spec and base that the README's `headrace submit` sends."""
    (line,) = re.findall(r"^\S+/headrace submit (.*)$", (DEPLOY / "README.md").read_text(), re.M)
    job, *options = shlex.split(moved(line))
    said = list(zip(options[::2], options[1::2], strict=True))
    spec = load_toml(ROOT / job, [value for option, value in said if option == "--set"])
    return {"spec": spec, "base": dict(said)["--base"], "start": False}


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not there, which setup.sh makes a key with")
def test_what_compose_runs_works_together(tmp_path, moved, service):
    # 1. Setup, twice: what is there is left as it is.
    made = set_up(tmp_path)
    assert set_up(tmp_path) == made
    run = tmp_path / "run"
    assert (run / "tls/server.key").stat().st_mode & 0o077 == 0
    with opened(load_service(tmp_path / "service.toml").database_url) as records:
        tokens = Tokens(StoredTokens(records))
        roles = {token.name: token.role for token in tokens.rows.all()}
        assert roles == {"replica": Role.OPERATOR, "prometheus": Role.VIEWER}
        _, admin = tokens.create("me", Role.ADMIN)

    # 2. The service, over TLS, for those whom setup gave a token.
    service.http = httpx.Client(timeout=60, verify=ssl.create_default_context(cafile=str(run / "scraping/server.pem")))
    service.start()
    url = str(service.http.base_url).replace("127.0.0.1", "localhost")
    assert url.startswith("https://")
    assert service.http.get("/v1/jobs").status_code == 401
    viewer = {"Authorization": f"Bearer {(run / 'scraping/headrace.token').read_text().strip()}"}
    assert "# TYPE headrace_state gauge" in service.http.get("/metrics", headers=viewer).text

    # 3. Its health check, as written.
    words = SERVICES["headrace"]["healthcheck"]["test"][1]
    words = moved(words).replace("https://localhost:8080", url).replace("python -c", f"{sys.executable} -c")
    subprocess.run(["sh", "-c", words], check=True, timeout=240)

    # 4. A job, as the README has it, and who feeds the replica asks for it.
    made_job = service.ask("POST", "/jobs", submitted(moved), Authorization=f"Bearer {admin}")
    assert made_job["name"] == "clicks"
    operator = {"Authorization": f"Bearer {(run / 'following/feed.token').read_text().strip()}"}
    (feed,) = re.findall(r"--feed=https://localhost:8080(\S+)", " ".join(SERVICES["replica"]["command"]))
    told = service.http.get(feed.replace("${HEADRACE_JOB:-clicks}", "clicks") + "/feed", headers=operator)
    assert told.status_code == 409, told.text  # let in, and the job does not run
    assert service.end() == 0


@pytest.mark.parametrize("name", ["headrace", "replica"])
def test_the_command_line_takes_the_commands(name):
    group = typer.main.get_command(main.cli)
    command, *words = SERVICES[name]["command"]
    with group.make_context("headrace", [command, *words]) as context:
        _, chosen, rest = group.resolve_command(context, [command, *words])
        with chosen.make_context(command, rest, parent=context) as parsed:
            assert json.dumps(parsed.params, default=str)
