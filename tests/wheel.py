"""The wheel as a user gets it: built from a copy of the checkout, installed into an environment outside of it."""

import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 120
BUILT_OF = ("dataset", "deploy", "headrace", "pserver", "service", "trainer")
FILES = ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md", "SECURITY.md")


def build(folder: Path) -> tuple[Path, Path]:
    """The sdist, and the wheel that is built from it."""
    tree = folder / "tree"
    tree.mkdir(parents=True)
    left_out = shutil.ignore_patterns("__pycache__", "data")
    for name in BUILT_OF:
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=None if name == "headrace" else left_out)
    for name in FILES:
        shutil.copy(ROOT / name, tree / name)
    out = folder / "dist"
    ran(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, tree)
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return sdist, wheel


def install(wheel: Path, folder: Path) -> Path:
    """An environment with the wheel, and with what it depends on from this one: its folder."""
    venv.EnvBuilder(symlinks=True).create(folder)
    ran(sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install", "--no-deps", "--no-index", wheel)
    (site,) = (folder / "lib").glob("python*/site-packages")
    # A line of a .pth file adds the folder alone, so the finder of the editable install there is not loaded.
    (site / "dependencies.pth").write_text(f"{sysconfig.get_paths()['purelib']}\n")
    return folder


def ran(*command: object) -> str:
    """The output of a command, which has to succeed."""
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr
