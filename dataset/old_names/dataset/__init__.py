"""The name that `headrace.dataset` had before version 0.2, for pipe commands: their PYTHONPATH begins with this folder.

A generator may import another `dataset`: one beside it is found before this one, and one that is installed is loaded
in its place. Otherwise the modules of `headrace.dataset` are found here: `from dataset.generator import DataGenerator`.
"""

import sys
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from pathlib import Path

import headrace.dataset


def _other() -> ModuleSpec | None:
    """Another package `dataset` that can be imported here."""
    for folder in sys.path:
        spec = PathFinder.find_spec(__name__, [folder])
        if spec and spec.loader and spec.origin and Path(spec.origin).resolve() not in ours:
            return spec
    return None


ours = [Path(each).resolve() for each in (__file__, headrace.dataset.__file__)]
if (other := _other()) is not None:
    sys.modules[__name__] = module_from_spec(other)
    other.loader.exec_module(sys.modules[__name__])  # type: ignore[union-attr]
else:
    __path__ = headrace.dataset.__path__
