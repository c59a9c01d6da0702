"""The house style that a tool can hold: sizes, names, plain words, and that the imported packages are ours."""

import ast
import builtins
import importlib
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("service", "trainer", "pserver", "dataset", "headrace")
LINES_MAX, FUNCTION_LINES_MAX = 600, 70


@dataclass(frozen=True)
class Source:
    """A file of the product, parsed."""

    path: Path
    num_lines: int
    tree: ast.Module
    nodes: Sequence[ast.AST]
    """All of the tree."""


def source_files() -> Iterator[Path]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if "_pb2" not in path.name:
                yield path


@pytest.fixture(scope="module")
def sources() -> list[Source]:
    """Parsed once for all tests."""
    texts = {path: path.read_text() for path in source_files()}
    trees = {path: ast.parse(text) for path, text in texts.items()}
    return [Source(path, texts[path].count("\n"), tree, list(ast.walk(tree))) for path, tree in trees.items()]


def test_files_and_functions_fit_a_reader(sources):
    offences = []
    for source in sources:
        if source.num_lines > LINES_MAX:
            offences.append(f"{source.path}: {source.num_lines} lines")
        for node in source.nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                if (lines := node.end_lineno - node.lineno + 1) > FUNCTION_LINES_MAX:
                    offences.append(f"{source.path}:{node.lineno} {node.name}: {lines} lines")
    assert not offences, "\n".join(offences)


def test_no_two_public_classes_share_a_name(sources):
    places = defaultdict(list)
    for source in sources:
        for node in source.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(source.path.relative_to(ROOT)))
    offences = [f"{name}: {', '.join(found)}" for name, found in sorted(places.items()) if len(found) > 1]
    assert not offences, "\n".join(offences)


def test_no_package_has_two_files_of_one_name():
    places = defaultdict(list)
    for path in source_files():
        if path.stem not in ("__init__", "__main__", "config"):
            relative = path.relative_to(ROOT)
            places[relative.parts[0], path.stem].append(str(relative))
    offences = [", ".join(found) for _, found in sorted(places.items()) if len(found) > 1]
    assert not offences, "\n".join(offences)


def test_no_docstring_begins_like_a_question_without_asking_one(sources):
    """Style, R16: subject, verb, object. "What the log says" is neither a sentence nor a question."""
    offences = []
    for source in sources:
        for line, text in docstrings(source):
            first = text.strip().split("\n\n")[0]
            if re.match(r"(What|Who|Whose|Whom)\b", first) and not first.rstrip().endswith("?"):
                offences.append(f"{source.path.relative_to(ROOT)}:{line}: {first.splitlines()[0]}")
    assert not offences, "\n".join(offences)


def test_classes_that_docstrings_name_exist(sources):
    """ "See Updates" and "Raises TooMany" must follow a class when it is renamed."""
    known = set(dir(builtins))
    for node in (node for source in sources for node in source.nodes):
        match node:
            case ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                known.add(name)
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                known |= {alias.asname or alias.name for alias in names}
    offences = [
        f"{source.path.relative_to(ROOT)}:{line}: {name}"
        for source in sources
        for line, text in docstrings(source)
        for named in re.findall(r"\b(?:[Ss]ee|Raises?) ((?:[A-Z][a-z]\w+(?:, | and |, and )?)+)", text)
        for name in re.findall(r"[A-Z][a-z]\w+", named)
        if name not in known
    ]
    assert not offences, "\n".join(offences)


def test_a_contract_is_told_once(sources):
    """A public class or method has a docstring, but for a method whose contract a base or protocol tells, and for the
    only public class of a module, which the module's docstring describes. No docstring begins with "See"."""
    classes = [node for each in sources for node in each.nodes if isinstance(node, ast.ClassDef)]
    bases = {name_of(base) for each in classes for base in each.bases}
    promised = {
        method.name
        for each in classes
        if each.name in bases or "Protocol" in map(name_of, each.bases)
        for method in methods(each)
        if ast.get_docstring(method)
    }
    offences = []
    for source in sources:
        path, tree = source.path, source.tree
        public = [node for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
        silent = [each for each in public if not ast.get_docstring(each)]
        for each in silent if len(public) > 1 or path.name == "__init__.py" else ():
            offences.append(f"{path}:{each.lineno} {each.name}")
        for each in public:
            for method in methods(each):
                if not method.name.startswith("_") and not ast.get_docstring(method) and method.name not in promised:
                    offences.append(f"{path}:{method.lineno} {each.name}.{method.name}")
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and (ast.get_docstring(node) or "").startswith("See "):
                offences.append(f"{path}:{node.lineno} {node.name}: it only points elsewhere")
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


def docstrings(source: Source) -> Iterator[tuple[int, str]]:
    """Every string that stands alone as a statement: docstrings, and those below a field or a constant."""
    for node in source.nodes:
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
    folders = "|".join(sorted(set(PACKAGES) - {"headrace"}))
    like_one = re.compile(rf"\b(?:from|import)\s+(?:[\w.]+(?:\s+as\s+\w+)?\s*,\s*)*(?:{folders})\b")
    golden = ROOT / "tests" / "golden"
    beside = [path for name in ("tests", "deploy") for path in sorted((ROOT / name).rglob("*.py"))]
    for path in (*source_files(), *(path for path in beside if golden not in path.parents)):
        if not like_one.search(text := path.read_text()):
            continue  # most files need not be parsed
        for node in ast.walk(ast.parse(text)):
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            offences += [f"{path}: {name}" for name in names if name.split(".")[0] in set(PACKAGES) - {"headrace"}]
    assert not offences, "\n".join(offences)
