"""The pages that a newcomer follows: every block runs, in its order, as it is printed. The tutorial: test_wheel.py."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kafka.cluster import free_ports

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
CLUSTER = (ROOT / "docs" / "cluster.md").read_text()
FIRST_MODEL = (ROOT / "docs" / "first-model.md").read_text()
EXPORTS = (ROOT / "docs" / "exports.md").read_text()
TUTORIAL = (ROOT / "docs" / "tutorial.md").read_text()
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.M | re.S)
LIMIT_S = 600


def blocks(page):
    """Language, file name and text of every block of a page; the name of a block that is no file is empty."""
    return BLOCK.findall(page)


def script(page):
    """One shell script of a page: a block with a file name is written to that file, a block of `sh` is run."""
    parts = ["set -euo pipefail"]
    for language, name, text in blocks(page):
        if name:
            parts.append(f"cat > {name} <<'END OF THE FILE'\n{text}END OF THE FILE")
        elif language == "sh":
            parts.append(text)
    return "\n".join(parts)


def followed(page, folder, *apart, environment=sys.prefix):
    """What a reader sees who follows `page` in `folder`, which has `environment`.

    `apart`: the command that the shell runs under.
    """
    (folder / ".venv").symlink_to(environment)
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "HEADRACE"))}
    said = folder / "output"
    with said.open("w") as out:
        shell = subprocess.Popen(
            [*apart, "bash", "-c", script(page)], cwd=folder, env=env, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=out, stderr=out,
        )  # fmt: skip
        try:
            shell.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            pytest.fail(f"not done within {LIMIT_S} s:\n{said.read_text()}")
        finally:
            with contextlib.suppress(ProcessLookupError):  # what the page has started and a failure left
                os.killpg(shell.pid, signal.SIGKILL)
            shell.wait()
    assert shell.returncode == 0, said.read_text()
    return said.read_text()


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 60)
def test_the_page_about_clusters_gives_the_same_digest_by_hand_and_by_torchrun(tmp_path):
    alone, _, _ = CLUSTER.partition("## 4.")  # tests/machines/test_documented_cluster.py follows the rest
    page = alone.replace(":7070", f":{free_ports(1)[0]}")
    output = followed(page, tmp_path)
    assert "waits for 4 of 4 workers: trainer-0, trainer-1, shard-0, shard-1" in output
    assert output.count("done: the stream is drained") == 3
    reports = [json.loads((tmp_path / "cluster" / store / "report.json").read_text()) for store in ("alone", "store")]
    assert len({report["digest"] for report in reports}) == 1, "the store is that of torchrun now"


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.skipif(os.geteuid() != 0, reason="`ray stop` ends every Ray of the machine: a PID namespace needs root")
def test_the_page_about_clusters_gives_the_same_digest_on_ray(tmp_path):
    parts = re.split(r"^(?=## )", CLUSTER, flags=re.M)
    page = "".join(part for part in parts if part.startswith(("## 1. ", "## 5. Ray")))
    port = str(free_ports(1)[0])
    output = followed(
        page.replace("6379", port), tmp_path, "unshare", "--pid", "--fork", "--kill-child", "--mount-proc"
    )
    assert f"waits for the Ray cluster at 127.0.0.1:{port}, which starts 4 workers" in output
    assert output.count("done: the stream is drained") == 2


@pytest.mark.long
@pytest.mark.timeout(LIMIT_S + 60)
def test_the_hello_world_of_the_readme_trains_and_predicts(tmp_path):
    output = followed(README, tmp_path)
    assert "done: the stream is drained" in output
    (auc,) = re.findall(r"^AUC ctr: life ([\d.]+)", output, re.M)
    assert float(auc) > 0.6, "it learns"
    assert "predicted: 20,000 samples of 20,000 events" in output


@pytest.mark.long
@pytest.mark.timeout(LIMIT_S + 60)
def test_the_first_model_is_inferred_trained_improved_and_served(tmp_path):
    page = FIRST_MODEL.replace(":8090", f":{free_ports(1)[0]}")
    output = followed(page, tmp_path)
    assert "20,000 events read, 0 bad lines" in output
    assert output.count("done: the stream is drained") == 2, "the second run trains the new events only"
    assert re.search(r"^events +21,000$", output, re.M), output
    likes, likes_not = (float(number) for number in re.findall(r"'prediction.ctr': ([\d.]+)", output))
    assert likes > likes_not
    assert '"model_version"' in output


@pytest.mark.long
@pytest.mark.timeout(LIMIT_S + 60)
def test_the_page_about_exports_serves_the_example_clicks_with_and_without_headrace(tmp_path):
    page = EXPORTS.replace(":8090", f":{free_ports(1)[0]}")
    output = followed(page, tmp_path)
    assert '"name":"clicks"' in output.replace(" ", "")
    (difference,) = re.findall(r"golden samples, [\d,]+ rows: largest difference (\S+)", output)
    assert float(difference) < 1e-5


def test_the_tutorial_has_every_file_that_its_commands_name():
    written = {name for _, name, _ in blocks(TUTORIAL) if name}
    assert written == {"fill.py", "generator.py", "job.toml"}
