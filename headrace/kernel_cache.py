"""The cache of compiled kernels, which notices changes in other files that a kernel calls.

Numba keeps compiled code on disk and compares the hash of the kernel's own file. But the code of kernels called from
other files is compiled in, and so are the values of constants. So the hash here covers also the files of all modules
with kernels that a module imports from, directly or through each other, and its constants.
"""

import hashlib
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numba
import numpy as np

_CONSTANTS = (int, float, str, np.generic)
_modules: set[str] = set()
"""Modules with kernels."""
_unloaded: list[Any] = []
"""Kernels that may be in the cache and were not looked for yet."""


def njit(**options: Any) -> Any:
    """`numba.njit`. With `cache=True`, code compiled from other sources than those of now is compiled again."""
    compiler = numba.njit(**options)

    def compiled(function: Callable[..., Any]) -> Any:
        kernel = compiler(function)
        _modules.add(function.__module__)
        if options.get("cache"):
            # Numba offers its locators of caches by an environment variable only, which child processes would inherit.
            index = kernel._cache._cache_file  # noqa: SLF001
            index._source_stamp = index._source_stamp, _hash_of(function.__module__, function.__globals__)  # noqa: SLF001
            _unloaded.append(kernel)
        return kernel

    return compiled


def load_kernels() -> None:
    """Load the kernels of the imported modules from the cache. One that is not in it is compiled at its first call.

    Dispatchers have no public call for this, so the signatures are read from their private index.
    """
    while _unloaded:
        kernel = _unloaded.pop()
        for signature, *_ in kernel._cache._cache_file._load_index():  # noqa: SLF001
            kernel.compile(signature)


def _hash_of(module: str, names: Mapping[str, Any]) -> str:
    """A hash of all that kernels of `module` may compile in from elsewhere; `names` are those it has so far."""
    found = set()
    for name, value in names.items():
        origin = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
        if origin in _modules and origin != module:
            found.add((origin, _hash_of_module(origin)))
        elif isinstance(value, _CONSTANTS) and name.isupper():
            found.add((name, repr(value)))
    return hashlib.sha256(repr(sorted(found)).encode()).hexdigest()


@cache
def _hash_of_module(module: str) -> str:
    """A hash of an imported module's file and of all that its kernels compile in."""
    imported = sys.modules[module]
    assert imported.__file__ is not None, "kernels are in files"
    text = Path(imported.__file__).read_bytes()
    return hashlib.sha256(text + _hash_of(module, vars(imported)).encode()).hexdigest()
