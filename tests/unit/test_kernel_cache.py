"""Compiled kernels in the cache are those of the sources as they are now, in whatever file these are."""

import importlib
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ["headrace", "dataset", "pserver", "trainer", "service"]
HEAD = "from headrace.kernel_cache import njit\n"
LEAF = HEAD + "@njit(cache=True)\ndef leaf(x):\n    return x + {amount}\n"
MIDDLE = HEAD + "from {leaf} import leaf\n@njit(cache=True)\ndef middle(x):\n    return leaf(x) * 10\n"
TOP = HEAD + (
    "from {middle} import middle\nfrom {bound} import BOUND\n"
    "@njit(cache=True)\ndef top(x):\n    return middle(x) + BOUND\n"
)


class Sources:
    """Modules with kernels that call each other: top -> middle -> leaf, and a constant."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.names = {role: f"{role}_{folder.name}" for role in ("leaf", "middle", "bound", "top")}
        self.write("leaf", LEAF.format(amount=1))
        self.write("middle", MIDDLE.format(**self.names))
        self.write("bound", "BOUND = 100\n")
        self.write("top", TOP.format(**self.names))

    def write(self, role: str, text: str) -> None:
        (self._folder / f"{self.names[role]}.py").write_text(text)

    def kernel(self):
        """The kernel on top, as a process that starts now gets it."""
        from headrace import kernel_cache

        kernel_cache._hash_of_module.cache_clear()
        for name in self.names.values():
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        return importlib.import_module(self.names["top"]).top


@pytest.fixture
def sources(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # Python itself looks at whole seconds
    made = Sources(tmp_path)
    yield made
    for name in made.names.values():
        sys.modules.pop(name, None)


def test_a_kernel_is_loaded_from_the_cache_while_nothing_changed(sources):
    for expected_hits in (0, 1):
        top = sources.kernel()
        assert top(1) == 120
        assert sum(top.stats.cache_hits.values()) == expected_hits


@pytest.mark.parametrize(
    ("role", "text", "result"),
    [("leaf", LEAF.format(amount=2), 130), ("bound", "BOUND = 500\n", 520)],
)
def test_a_kernel_is_compiled_again_after_a_change_of_another_file(sources, role, text, result):
    assert sources.kernel()(1) == 120
    sources.write(role, text)
    top = sources.kernel()
    assert top(1) == result
    assert sum(top.stats.cache_hits.values()) == 0
    assert sources.kernel()(1) == result


def test_a_change_of_a_caller_leaves_the_code_of_what_it_calls(sources):
    assert sources.kernel()(1) == 120
    sources.write("top", TOP.format(**sources.names).replace("+ BOUND", "- BOUND"))
    assert sources.kernel()(1) == -80
    middle = importlib.import_module(sources.names["middle"]).middle
    assert middle(1) == 20 and sum(middle.stats.cache_hits.values()) == 1


def test_every_kernel_that_is_cached_has_this_cache():
    imports = re.compile(r"^\s*from numba import .*\bnjit\b|\bnumba\.njit\b", re.MULTILINE)
    files = [
        path for package in PACKAGES for path in (ROOT / package).rglob("*.py") if imports.search(path.read_text())
    ]
    assert [str(path.relative_to(ROOT)) for path in files] == ["headrace/kernel_cache.py"]
