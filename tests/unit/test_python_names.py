"""The names that users import from headrace: quick to import, each with its type, and without what trains."""

import ast
import subprocess
import sys
from pathlib import Path

import headrace

STUB = Path(headrace.__file__).with_suffix(".pyi")


def test_every_name_of_the_stub_is_there():
    names = [
        alias.asname
        for node in ast.parse(STUB.read_text()).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]
    assert {"Job", "connect", "DataGenerator"} <= set(names) <= set(dir(headrace))


def test_the_names_of_the_control_plane_come_without_torch_and_headrace_alone_without_anything():
    program = """
import sys
import headrace
assert not {"numpy", "pyarrow", "pydantic", "headrace.config"} & sys.modules.keys()
from headrace import Job, connect, connect_async
assert "torch" not in sys.modules and "fastapi" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=110)
