"""Makes service/python/service_actions.pyi out of the OpenAPI document: the actions of a service, typed."""

import keyword
import re
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from headrace.service.python.service_connection import CONTROLS, RestAction, actions_of

HEAD = """# Made by docs/generate.py out of the OpenAPI document: `make reference`.

from collections.abc import Callable
from typing import Any, Literal, NotRequired, TypedDict
"""
WIDTH = 116
PLAIN = {"string": "str", "integer": "int", "number": "float", "boolean": "bool", "null": "None"}
OPERATION = (
    "wait: bool = True",
    "timeout_s: float = ...",
    "notify: Callable[[str], None] | None = None",
)
assert tuple(each.partition(":")[0] for each in OPERATION) == CONTROLS


def stub(document: Mapping[str, Any]) -> str:
    """The text of service_actions.pyi."""
    actions, schemas = actions_of(document), document["components"]["schemas"]
    told = {each["operationId"]: each for methods in document["paths"].values() for each in methods.values()}
    named = dict(zip(actions, told.values(), strict=True))
    sync, waits = ([*_methods(actions, named, word)] for word in ("def", "async def"))
    used = _used(schemas, "\n".join(sync))
    return "\n".join(
        [HEAD, *(_body(name, schemas[name]) for name in used), *_class("ServiceActions", "A service's actions.", sync),
         *_class("AsyncServiceActions", "A service's actions, each awaited.", waits)]
    )  # fmt: skip


def _class(name: str, docstring: str, methods: list[str]) -> list[str]:
    return [f'class {name}:\n    """{docstring}"""\n', *methods]


def _methods(actions: Mapping[str, RestAction], told: Mapping[str, Any], word: str) -> Iterator[str]:
    for name, action in actions.items():
        if action.answer == "stream":
            continue  # it has a method of its own
        given = [each for each in (*action.in_query, *action.in_body) if each not in action.in_path]
        assert len({*given, *action.in_path, *CONTROLS}) == len(given) + len(action.in_path) + len(CONTROLS), name
        assert not any(map(keyword.iskeyword, given)), name
        types = {each["name"]: type_of(each["schema"]) for each in told[name].get("parameters", ())}
        types |= {each: type_of(schema) for each, schema in action.in_body.items()}
        named = [f"{each}: {_optional(types[each], needed=each in action.required)}" for each in given]
        named += OPERATION if action.answer == "operation" else ()
        parameters = ["self", *(f"{each}: str" for each in action.in_path), *(["*", *named] if named else [])]
        head = f"    {word} {name}({', '.join(parameters)}) -> {_result(action)}:"
        text = told[name].get("description", told[name]["summary"])
        yield f"{head} ..." if word != "def" else f"{head}\n{_docstring(text, 8)}\n        ...\n"


def _optional(kind: str, *, needed: bool) -> str:
    return kind if needed else f"{kind} = ..." if kind.endswith("None") else f"{kind} | None = ..."


def _result(action: RestAction) -> str:
    kind = {"file": "bytes", "value": type_of(action.schema) if action.schema else "None"}
    if action.answer == "list":
        return f"list[{type_of(action.schema)}]"
    return kind.get(action.answer) or type_of(action.schema)


def _docstring(text: str, indent: int) -> str:
    space = " " * indent
    text = " ".join(text.replace("\\", "\\\\").split())
    text += " " * text.endswith('"')
    return textwrap.fill(f'"""{text}"""', WIDTH, initial_indent=space, subsequent_indent=space, break_long_words=False)


def _used(schemas: Mapping[str, Any], text: str) -> list[str]:
    """Every body that the methods name, and those that these name."""
    found: dict[str, None] = {}
    waiting = [text]
    while waiting:
        at = waiting.pop()
        for name in schemas:
            if name not in found and _names(at, name):
                found[name] = None
                waiting.append(_body(name, schemas[name]))
    return [name for name in schemas if name in found]


def _names(text: str, name: str) -> bool:
    return re.search(rf"\b{name}\b", text) is not None


def _body(name: str, schema: Mapping[str, Any]) -> str:
    if "properties" not in schema:
        return f"{name} = {type_of(schema)}\n"
    required = schema.get("required", ())
    if any(map(keyword.iskeyword, schema["properties"])):  # no class can have such a field
        kinds = {
            each: type_of(of) if each in required else f"NotRequired[{type_of(of)}]"
            for each, of in schema["properties"].items()
        }
        inner = ", ".join(f"{each!r}: {kind}" for each, kind in kinds.items())
        return f'{name} = TypedDict("{name}", {{{inner}}})\n{_docstring(schema["description"], 0)}\n'
    lines = [f"class {name}(TypedDict):", _docstring(schema.get("description", name), 4), ""]
    for field, of in schema["properties"].items():
        kind = type_of(of)
        lines.append(f"    {field}: {kind if field in required else f'NotRequired[{kind}]'}")
        if of.get("description"):
            lines.append(_docstring(of["description"], 4))
    return "\n".join(lines) + "\n"


def type_of(schema: Mapping[str, Any]) -> str:
    """The Python type of a schema's values, as JSON gives them."""
    if "$ref" in schema:
        return str(schema["$ref"].rpartition("/")[2])
    if choices := schema.get("enum") or ([schema["const"]] if "const" in schema else []):
        return f"Literal[{', '.join(map(repr, choices))}]"
    if several := schema.get("anyOf") or schema.get("oneOf"):
        return " | ".join(sorted(dict.fromkeys(map(type_of, several)), key=lambda kind: kind == "None"))
    match schema.get("type"):
        case "array":
            return f"list[{type_of(schema['items']) if schema.get('items') else 'Any'}]"
        case "object":
            inner = schema.get("additionalProperties")
            return f"dict[str, {type_of(inner) if isinstance(inner, dict) and inner else 'Any'}]"
        case str(kind):
            return PLAIN[kind]
    return "Any"
