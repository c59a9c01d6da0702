"""The command line starts at once: what a command imports, held by names and a number of modules, not by seconds."""

import subprocess
import sys
from pathlib import Path

import pytest
import typer

from headrace.pserver import config as rows
from headrace.service.cli import main, prediction_commands, resize_command, size_command, table_commands
from headrace.service.cli.panels import Panel
from headrace.service.cluster import resizing
from headrace.service.history.slot_report import SlotOrder
from headrace.service.planning import job_size
from headrace.trainer.predict import config as predictions

JOB = Path(__file__).parents[2] / "deploy" / "examples" / "clicks" / "job.toml"
SCRIPT = """
import atexit, sys
sys.argv = ["headrace", *sys.argv[1:]]
atexit.register(lambda: print(*sys.modules, file=sys.stderr))
from headrace.service.__main__ import run
run()
"""
HEAVY = {
    "alembic", "botocore", "confluent_kafka", "cryptography", "fastapi", "fastavro", "google", "grpc", "httpx", "kafka",
    "llvmlite", "markdown_it", "nicegui", "numba", "obstore", "onnx", "onnxruntime", "pyarrow", "pygments", "ray",
    "rich", "rocksdict", "safetensors", "sqlalchemy", "starlette", "torch", "uvicorn", "yaml", "zmq",
}  # fmt: skip
"""Libraries that no page of help needs, nor the check of a job file."""
SPEC = {"numpy", "pydantic"}
"""Those that job files need, too."""


def imported(*arguments):
    """The modules that a command has imported at its end."""
    script = [sys.executable, "-c", SCRIPT, *map(str, arguments)]
    ended = subprocess.run(script, capture_output=True, text=True, check=True)
    return set(ended.stderr.split())


def commands(command, name="headrace"):
    """Every command by its words."""
    children = getattr(command, "commands", None)
    if children is None:
        yield name, command
    for child in children or ():
        yield from commands(children[child], f"{name} {child}")


ROOT = typer.main.get_command(main.cli)
EVERY = dict(commands(ROOT))


@pytest.mark.parametrize(
    ("arguments", "barred", "most"),
    [
        (["version"], HEAVY | SPEC | {"typer"}, 150),
        (["--version"], HEAVY | SPEC | {"typer"}, 150),
        (["--help"], HEAVY | SPEC, 300),
        (["run", "--help"], HEAVY | {"numpy"}, 420),
        (["spec", "--help"], HEAVY | {"numpy"}, 420),
        (["spec", "check", JOB], HEAVY, 720),
        (["spec", "schema"], HEAVY, 720),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else "",
)
def test_a_command_imports_what_it_needs(arguments, barred, most):
    modules = imported(*arguments)
    assert {name.partition(".")[0] for name in modules} & barred == set()
    assert len(modules) <= most


def test_no_command_is_left_out_of_the_panels_and_run_is_the_first():
    by_panel = {panel: [] for panel in Panel}
    for name, command in ROOT.commands.items():
        by_panel[command.rich_help_panel].append(name)
    assert all(by_panel.values())
    assert by_panel[Panel.TRAIN][0] == "run" and by_panel[Panel.OTHER] == ["version"]


@pytest.mark.parametrize("name", EVERY)
def test_the_help_of_a_command_ends_with_an_example_of_it(name):
    *_, last = EVERY[name].help.splitlines()
    assert f"{last} ".startswith(f"Example: {name} ") and len(last) <= 92


def test_help_has_a_short_name_everywhere(capsys):
    for words in ([], ["commits"], ["run"], ["commits", "list"]):
        with pytest.raises(SystemExit) as end:
            main.cli([*words, "-h"], prog_name="headrace")
        shown = capsys.readouterr().out
        assert end.value.code == 0 and shown.startswith(" ".join(["Usage: headrace", *words, "[OPTIONS]"]))
        assert "-h, --help" in shown and "<bool>" not in shown


def test_choices_and_limits_told_again_are_those_of_their_owners():
    """The owners load slowly, so the command line has copies."""

    def choices(command, option):
        return {*next(one for one in EVERY[command].params if one.name == option).type_descriptor.choices}

    assert choices("headrace predict", "wire") == {*rows.Wire} and choices("headrace doctor", "by") == {*SlotOrder}
    assert prediction_commands.LIVE == predictions.LIVE
    assert (table_commands.LAST_DAY, table_commands.MAX_DAYS) == (rows.LAST_DAY, rows.MAX_DAYS)
    assert (resize_command.MOVE_S, size_command.MAX_SAMPLE) == (resizing.MOVE_S, job_size.MAX_SAMPLE)


@pytest.mark.parametrize("launcher", ["server.foreground_run", "jobs.launcher"])
def test_the_launcher_of_a_job_loads_neither_kernels_nor_stores(launcher):
    script = f"import sys, headrace.service.cluster.local, headrace.service.{launcher}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not {"numba", "pyarrow", "rocksdict", "safetensors", "torch", "yaml"} & {*done.stdout.split()}
