"""Generates the Python code of every `.proto` file, or checks that it is up to date.

`python -m headrace.proto.generate [--check]` covers the `proto/` folders of all packages. The result is
committed, so Headrace runs without protoc.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("headrace/proto", "headrace/*/proto")
SUFFIXES = ("_pb2.py", "_pb2.pyi")


def protos(root: Path = ROOT) -> list[Path]:
    """Every `.proto` file, relative to `root`."""
    return sorted(path.relative_to(root) for folder in FOLDERS for path in root.glob(f"{folder}/*.proto"))


def generate(out: Path, root: Path = ROOT) -> None:
    """Write the Python code of all protos of `root` to the same folders below `out`."""
    from grpc_tools import protoc  # a development dependency

    bundled = resources.files("grpc_tools") / "_proto"
    targets = [f"--{kind}_out={out}" for kind in ("python", "pyi")]
    arguments = ["protoc", f"-I{root}", f"-I{bundled}", *targets, *map(str, protos(root))]
    if protoc.main(arguments) != 0:
        raise SystemExit("protoc failed")


def out_of_date(root: Path = ROOT) -> list[str]:
    """Generated files below `root` that differ from the protos, or have no proto."""
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder)
        generate(made, root)
        fresh = {path.relative_to(made): path.read_bytes() for path in made.rglob("*.py*")}
    generated = (path for folder in FOLDERS for suffix in SUFFIXES for path in root.glob(f"{folder}/*{suffix}"))
    present = {path.relative_to(root): path.read_bytes() for path in generated}
    return sorted(str(name) for name in fresh.keys() | present.keys() if fresh.get(name) != present.get(name))


def main(arguments: Sequence[str] | None = None) -> int:
    """Generate, or with --check only compare; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a file is out of date")
    if not parser.parse_args(arguments).check:
        generate(ROOT)
        return 0
    late = out_of_date()
    for name in late:
        print(f"{name}: out of date; run python -m headrace.proto.generate", file=sys.stderr)
    return 1 if late else 0


if __name__ == "__main__":
    raise SystemExit(main())
