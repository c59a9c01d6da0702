"""The generators in other languages write the samples of the Python generator, byte for byte, and a job learns the same
from them. Java is required; the others are built where their compilers are."""

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.e2e.test_examples import EXAMPLES

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

SOURCES, CRITEO = EXAMPLES / "generators", EXAMPLES / "criteo"
BUILDS = {
    "go": (["go", "build", "-o", "criteo", str(SOURCES / "criteo.go")], ["./criteo"]),
    "rustc": (["rustc", "-O", "-o", "criteo", str(SOURCES / "criteo.rs")], ["./criteo"]),
    "javac": (["javac", "-d", ".", str(SOURCES / "Criteo.java")], ["java", "-cp", ".", "Criteo"]),
}
FOUND = ["javac", *(name for name in ("go", "rustc") if shutil.which(name))]


def events(num: int) -> bytes:
    """Lines as Kaggle's: integers of every size, negative ones, empty fields."""
    rng = np.random.default_rng(3)
    lines = []
    for _ in range(num):
        integers = [str(int(rng.integers(-3, 10 ** int(rng.integers(1, 7))))) for _ in range(13)]
        categories = [f"{int(each):08x}" for each in rng.integers(2**32, size=26)]
        fields = [field if rng.random() < 0.8 else "" for field in integers + categories]
        lines.append("\t".join([str(int(rng.integers(2))), *fields]))
    return "\n".join(lines).encode() + b"\n"


def output(command: list[str], given: bytes, folder: Path) -> bytes:
    return subprocess.run(command, input=given, stdout=subprocess.PIPE, cwd=folder, check=True, timeout=300).stdout


@pytest.fixture(scope="module")
def written() -> tuple[bytes, bytes]:
    given = events(3000)
    return given, output([sys.executable, "generator.py", "--spec", "job.toml"], given, CRITEO)


@pytest.mark.parametrize("compiler", FOUND)
def test_a_generator_in_another_language_writes_the_bytes_of_python(compiler, written, tmp_path):
    build, command = BUILDS[compiler]
    subprocess.run(build, cwd=tmp_path, check=True, timeout=500)
    given, wanted = written
    assert wanted.count(b"\n") == 3000 and output(command, given, tmp_path) == wanted
    (rejected,) = output(command, b"0\t1\t2\n", tmp_path).splitlines()
    assert rejected == b"! 3 fields instead of 40"
