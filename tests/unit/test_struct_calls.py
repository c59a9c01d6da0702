"""The plugin of mypy finds calls that are for dataclasses alone."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import dataclasses
from dataclasses import asdict, replace
import msgspec

class Struct(msgspec.Struct):
    a: int

@dataclasses.dataclass
class Plain:
    a: int

def change(one: Struct, two: Plain, some: Struct | Plain) -> None:
    asdict(one), asdict(two)
    asdict(some)
    replace(one, a=2), replace(two, a=3)
    dataclasses.fields(Plain(a=1))
"""


@pytest.mark.long
def test_mypy_refuses_functions_of_dataclasses_for_a_struct(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "mypy.ini").write_text(f"[mypy]\nplugins = {ROOT / 'tests/struct_calls.py'}\n")
    told = subprocess.run(
        [sys.executable, "-m", "mypy", "program.py"], cwd=tmp_path, capture_output=True, text=True, timeout=110
    )
    words = [line.split("error: ")[1] for line in told.stdout.splitlines() if "error: " in line]
    asdict_, replace_ = (f"Struct is a Struct: use msgspec.structs.{name}  [misc]" for name in ("asdict", "replace"))
    assert words == [asdict_, asdict_, replace_], told.stdout
    assert 'plugins = ["tests/struct_calls.py"]' in (ROOT / "pyproject.toml").read_text()
