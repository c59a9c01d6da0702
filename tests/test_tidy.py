"""The house style that a tool can hold: sizes, names, plain words, and that the imported packages are ours."""

import ast
import builtins
import importlib
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("service", "trainer", "pserver", "dataset", "headrace")
LINES_MAX, FUNCTION_LINES_MAX = 600, 70


def sources() -> Iterator[Path]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if "_pb2" not in path.name:
                yield path


def test_files_and_functions_fit_a_reader():
    offences = []
    for path in sources():
        text = path.read_text()
        if (lines := text.count("\n")) > LINES_MAX:
            offences.append(f"{path}: {lines} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                if (lines := node.end_lineno - node.lineno + 1) > FUNCTION_LINES_MAX:
                    offences.append(f"{path}:{node.lineno} {node.name}: {lines} lines")
    assert not offences, "\n".join(offences)


def test_no_two_public_classes_share_a_name():
    places = defaultdict(list)
    for path in sources():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path.relative_to(ROOT)))
    offences = [f"{name}: {', '.join(found)}" for name, found in sorted(places.items()) if len(found) > 1]
    assert not offences, "\n".join(offences)


def test_no_package_has_two_files_of_one_name():
    places = defaultdict(list)
    for path in sources():
        if path.stem not in ("__init__", "__main__", "config"):
            relative = path.relative_to(ROOT)
            places[relative.parts[0], path.stem].append(str(relative))
    offences = [", ".join(found) for _, found in sorted(places.items()) if len(found) > 1]
    assert not offences, "\n".join(offences)


def test_no_docstring_begins_like_a_question_without_asking_one():
    """Style, R16: subject, verb, object. "What the log says" is neither a sentence nor a question."""
    offences = []
    for path in sources():
        for line, text in docstrings(ast.parse(path.read_text())):
            first = text.strip().split("\n\n")[0]
            if re.match(r"(What|Who|Whose|Whom)\b", first) and not first.rstrip().endswith("?"):
                offences.append(f"{path.relative_to(ROOT)}:{line}: {first.splitlines()[0]}")
    assert not offences, "\n".join(offences)


def test_classes_that_docstrings_name_exist():
    """ "See Updates" and "Raises TooMany" must follow a class when it is renamed."""
    trees = {path: ast.parse(path.read_text()) for path in sources()}
    known = set(dir(builtins))
    for node in (node for tree in trees.values() for node in ast.walk(tree)):
        match node:
            case ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                known.add(name)
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                known |= {alias.asname or alias.name for alias in names}
    offences = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path, tree in trees.items()
        for line, text in docstrings(tree)
        for named in re.findall(r"\b(?:[Ss]ee|Raises?) ((?:[A-Z][a-z]\w+(?:, | and |, and )?)+)", text)
        for name in re.findall(r"[A-Z][a-z]\w+", named)
        if name not in known
    ]
    assert not offences, "\n".join(offences)


def test_a_contract_is_told_once():
    """A public class or method has a docstring, but for a method whose contract a base or protocol tells, and for the
    only public class of a module, which the module's docstring describes."""
    trees = {path: ast.parse(path.read_text()) for path in sources()}
    classes = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    bases = {name_of(base) for each in classes for base in each.bases}
    promised = {
        method.name
        for each in classes
        if each.name in bases or "Protocol" in map(name_of, each.bases)
        for method in methods(each)
        if ast.get_docstring(method)
    }
    offences = []
    for path, tree in trees.items():
        public = [node for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
        silent = [each for each in public if not ast.get_docstring(each)]
        for each in silent if len(public) > 1 or path.name == "__init__.py" else ():
            offences.append(f"{path}:{each.lineno} {each.name}")
        for each in public:
            for method in methods(each):
                if not method.name.startswith("_") and not ast.get_docstring(method) and method.name not in promised:
                    offences.append(f"{path}:{method.lineno} {each.name}.{method.name}")
    assert not offences, "\n".join(offences)


def name_of(base: ast.expr) -> str:
    """The last name of a base class, as in `Generic[T]` or `nn.Module`."""
    while isinstance(base, ast.Subscript | ast.Attribute):
        if isinstance(base, ast.Attribute):
            return base.attr
        base = base.value
    return base.id if isinstance(base, ast.Name) else ""


def methods(node: ast.ClassDef) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Every string that stands alone as a statement: docstrings, and those below a field or a constant."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def test_our_package_is_the_one_imported():
    found = Path(importlib.import_module("headrace").__file__).parent
    assert found == ROOT / "headrace", "another distribution owns the import name 'headrace'"


@pytest.mark.parametrize("name", [name for name in PACKAGES if name != "headrace"])
def test_each_top_folder_is_a_part_of_the_package(name):
    assert (ROOT / "headrace" / name).readlink() == Path("..") / name


def test_nothing_imports_a_top_folder_by_its_own_name():
    """A user's `dataset.py`, or another distribution's `service`, would be imported in its place."""
    offences = []
    golden = ROOT / "tests" / "golden"
    beside = [path for name in ("tests", "deploy") for path in sorted((ROOT / name).rglob("*.py"))]
    for path in (*sources(), *(path for path in beside if golden not in path.parents)):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            offences += [f"{path}: {name}" for name in names if name.split(".")[0] in set(PACKAGES) - {"headrace"}]
    assert not offences, "\n".join(offences)
