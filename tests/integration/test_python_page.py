"""Every block of the page "From Python" runs, one after another, and so does the notebook of the examples."""

import ast
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.http.listening import listen
from headrace.service.auth.roles import Role
from headrace.trainer.replica.http_api import serving
from tests.fakes.served import Job as ServedJob
from tests.fakes.warm import warm_environment
from tests.integration.served_host import SPEC, served_host
from tests.integration.stream_job import write_job
from tests.unit.test_replica_server import Served

pytestmark = [pytest.mark.usefixtures("warm"), pytest.mark.long, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
REMOTE = """
name = "remote"
sources.main = { kind = "simulated", events = 1000 }
pipe.command = ["cat"]
slots = [{ name = "user" }, { name = "label", kind = "meta" }]
tasks = [{ name = "ctr", label = "label" }]
model.name = "lr"
store.path = "store"
"""


def blocks() -> list[str]:
    text = (ROOT / "docs" / "python.md").read_text()
    return re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)


def test_every_block_of_the_page_runs(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    write_job(tmp_path)
    (tmp_path / "remote.toml").write_text(REMOTE)
    ServedJob(tmp_path / "exports" / "serving").export(1)
    served = Served(tmp_path / "replica").serve(1)
    listener = listen("127.0.0.1", 0, "--listen")
    with served_host(tmp_path) as host, serving(served.app, listener):
        host.create(SPEC)
        names = {"TOKEN": host.texts[Role.ADMIN]}
        addresses = {
            "http://127.0.0.1:8080": host.url,
            "http://127.0.0.1:8090": f"http://127.0.0.1:{listener.getsockname()[1]}",
        }
        for block in blocks():
            for written, real in addresses.items():
                block = block.replace(written, real)
            exec(compile(block, "docs/python.md", "exec"), names)  # noqa: S102  # the page's own lines
    said = capfd.readouterr().out
    assert "1179 " in said and "'prediction.ctr'" in said and "remote stopped" in said and "['stopped']" in said
    assert len(names["table"]) == 100 and len(names["found"]) == len(names["columns"]["a"]) == 2
    assert names["metrics"]["task"].to_pylist() == ["ctr"] * len(names["metrics"])


CELLS = """
import ast, json, sys
names = {}
for cell in json.load(open(sys.argv[1]))["cells"]:
    if cell["cell_type"] == "code":
        tree = ast.parse("".join(cell["source"]))
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "cell", "exec"), names)
        if last is not None:
            print("OUT", eval(compile(ast.Expression(last.value), "cell", "eval"), names))
"""


def test_every_cell_of_the_notebook_runs(tmp_path):
    shutil.copytree(ROOT / "deploy" / "examples" / "clicks", tmp_path / "clicks", ignore=shutil.ignore_patterns("runs"))
    done = subprocess.run(
        [sys.executable, "-c", CELLS, "notebook.ipynb"],
        cwd=tmp_path / "clicks",
        env=warm_environment(),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    checked, samples, metrics, predicted = re.findall(r"^OUT (.*)$", done.stdout, re.M)
    assert checked.startswith("JobCheck(job='clicks'") and int(samples) > 20_000
    last = ast.literal_eval(metrics)[-1]
    assert 0.5 < last["window_auc"] < 0.9
    assert [0 < each["prediction.ctr"] < 1 for each in ast.literal_eval(predicted)] == [True, True]


def test_the_notebook_has_no_output_and_names_its_form():
    notebook = json.loads((ROOT / "deploy" / "examples" / "clicks" / "notebook.ipynb").read_text())
    assert (notebook["nbformat"], notebook["metadata"]["language_info"]["name"]) == (4, "python")
    assert all(cell["outputs"] == [] for cell in notebook["cells"] if cell["cell_type"] == "code")
