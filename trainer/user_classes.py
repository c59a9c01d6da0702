"""Classes of users, a model or a metric, named "package.module:Class" in the job file.

A check of the job file finds and parses the file, and runs nothing of it; a trainer imports it. This module does not
import torch.
"""

import ast
import difflib
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

from headrace.errors import SpecError

KEY = "model.class"
MAX_BYTES = 4 << 20
"""A larger file is not parsed. A missing class is then reported at import."""


def split_class(path: str, key: str = KEY) -> tuple[str, str]:
    """Module and class of "package.module:Class". Raises SpecError for another form."""
    module_name, _, class_name = path.partition(":")
    if not class_name.isidentifier() or not all(part.isidentifier() for part in module_name.split(".")):
        raise SpecError(f'{path!r} is not of the form "package.module:Class"', key)
    return module_name, class_name


def check_class(path: str, folder: Path, key: str = KEY) -> None:
    """Raise SpecError if the module is neither in `folder` nor installed, or if its file has no such class."""
    module_name, class_name = split_class(path, key)
    spec = _find(module_name, folder)
    if spec is None:
        raise SpecError(f"no module {module_name!r} in {folder}, nor installed", key)
    file = Path(spec.origin) if spec.origin is not None and spec.origin.endswith(".py") else None
    if file is None or file.stat().st_size > MAX_BYTES:
        return
    try:
        tree = ast.parse(file.read_bytes(), str(file))
    except (SyntaxError, ValueError, RecursionError) as error:
        raise SpecError(f"module {module_name!r} cannot be imported: {error}", key) from error
    names = set(_names(tree))
    if class_name not in names and not names & {"*", "__getattr__"}:
        near = difflib.get_close_matches(class_name, sorted(names), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise SpecError(f"{file} has no class {class_name!r}{hint}", key)


def _find(module_name: str, folder: Path) -> ModuleSpec | None:
    """Find the module as an import would, without running its parent packages."""
    top, *rest = module_name.split(".")
    spec = PathFinder.find_spec(top, [str(folder), *sys.path])
    if spec is None:
        try:
            spec = importlib.util.find_spec(top)  # other finders, such as those of editable installs
        except (ImportError, ValueError):
            return None
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return None
        spec = PathFinder.find_spec(f"{spec.name}.{part}", list(spec.submodule_search_locations))
    return spec


def _names(tree: ast.AST) -> Iterator[str]:
    """All names that the file binds; "*" for a star import."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.alias):
            yield node.asname or node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def import_class(path: str, folder: Path, key: str) -> type:
    """The class at "package.module:Class", imported from `folder`, for the key of the spec that names it.

    Raises SpecError.
    """
    module_name, class_name = split_class(path, key)
    module = _import(module_name, folder, key)
    found = getattr(module, class_name, None)
    if not isinstance(found, type):
        near = difflib.get_close_matches(class_name, vars(module), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise SpecError(f"{module.__file__} has no class {class_name!r}{hint}", key)
    return found


def _import(name: str, folder: Path, key: str) -> ModuleType:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            raise SpecError(f"no module {error.name!r} in {folder}, nor installed", key) from None
        raise SpecError(f"module {name!r} needs {error.name!r}, which is not installed", key) from error
    except (ImportError, SyntaxError) as error:
        raise SpecError(f"module {name!r} cannot be imported: {error}", key) from error
