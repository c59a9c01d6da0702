"""A JSON Schema as tables of Markdown: one for each section, with a row for each key."""

import json
from collections.abc import Iterator
from typing import Any

UNIONS = ("anyOf", "oneOf", "allOf")


class Schema:
    """The definitions of a schema, and where each one is used."""

    def __init__(self, whole: dict[str, Any], refs: str = "#/$defs/") -> None:
        self._refs = refs
        self.definitions: dict[str, dict[str, Any]] = whole.get("$defs", {})
        self.places: dict[str, list[str]] = {}
        """The paths of each definition, both in the order in which a reader meets them."""
        self.root = whole if "properties" in whole else None
        for name, definition in self.definitions.items() if self.root is None else ():
            if "properties" in definition:
                self.places[name] = []
        if self.root is not None:
            self._walk(self.root, "")

    def _walk(self, section: dict[str, Any], path: str) -> None:
        for key, value in section.get("properties", {}).items():
            for name, suffix in self._used(value):
                place = f"{path}{key}{suffix}"
                first = name not in self.places
                places = self.places.setdefault(name, [])
                places += [place] if place not in places else []
                if first:
                    self._walk(self.definitions[name], f"{place}.")

    def _used(self, value: dict[str, Any], suffix: str = "") -> Iterator[tuple[str, str]]:
        """Definitions that a value is made of, each with what its path has after the key."""
        name = value.get("$ref", "").removeprefix(self._refs)
        if "properties" in self.definitions.get(name, {}):
            yield name, suffix
        for union in UNIONS:
            for choice in value.get(union, ()):
                yield from self._used(choice, suffix)
        if isinstance(value.get("items"), dict):
            yield from self._used(value["items"], f"{suffix}[]")
        for named in _named(value):
            yield from self._used(named, f"{suffix}.<name>")

    def title(self, name: str) -> str:
        """What a section is called: its kind, where there are several; else its place in the file; else its name."""
        kind = self.definitions.get(name, {}).get("properties", {}).get("kind", {}).get("const")
        places = self.places.get(name)
        return f'kind = "{kind}"' if kind else f"`{places[0]}`" if places else name

    def words(self, value: dict[str, Any]) -> str:
        """The type of a value, as words."""
        if "$ref" in value:
            name = value["$ref"].removeprefix(self._refs)
            inline = name in self.definitions and name not in self.places
            return self.words(self.definitions[name]) if inline else f"[{self.title(name)}](#{name.lower()})"
        if "const" in value:
            return f"`{json.dumps(value['const'])}`"
        if "enum" in value:
            return ", ".join(f"`{json.dumps(each)}`" for each in value["enum"])
        choices = [each for union in UNIONS for each in value.get(union, ()) if each.get("type") != "null"]
        if choices:
            return " or ".join(dict.fromkeys(self.words(each) for each in choices))
        if value.get("type") == "array":
            inner = value.get("prefixItems")
            if inner is None:
                return f"list of {self.words(value['items'])}"
            return f"list of {len(inner)} {'texts' if inner[0].get('type') == 'string' else 'numbers'}"
        if value.get("type") == "object":
            named = [self.words(each) for each in _named(value)]
            return f"{' or '.join(named)} by name" if named else "any keys"
        return _plain(value)


def _named(value: dict[str, Any]) -> list[dict[str, Any]]:
    """The schemas of a mapping whose names are the user's."""
    patterns = list(value.get("patternProperties", {}).values())
    other = value.get("additionalProperties")
    return [*patterns, *([other] if isinstance(other, dict) else [])]


def _plain(value: dict[str, Any]) -> str:
    """A number, text or boolean, with its bounds."""
    unit = _unit(value)
    if unit:
        return unit
    words = {"boolean": "true or false", "string": "text"}.get(value.get("type", ""), value.get("type", "any value"))
    bounds = [
        f"{sign} {value[key]:g}" if abs(value[key]) < 10**6 else ""
        for key, sign in (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"), ("exclusiveMaximum", "<"))
        if key in value
    ]
    return ", ".join([words, *(bound for bound in bounds if bound)])


def _unit(value: dict[str, Any]) -> str:
    """What a text with a unit says; empty for others."""
    return {"1s": "duration", "512MiB": "size"}.get((value.get("examples") or [""])[0], "")


def _default(value: dict[str, Any]) -> str:
    """The default of a key as a job file has it; a dash stands for none."""
    default = value.get("default")
    unit = {_unit(each) for each in (value, *value.get("anyOf", ()))} - {""}
    if default is None or isinstance(default, dict):
        return "-"
    if unit == {"duration"}:
        return f'`"{_with_unit(default, (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)))}"`'
    if unit == {"size"}:
        return f'`"{_with_unit(default, (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1)))}"`'
    return f"`{json.dumps(default)}`"


def _with_unit(number: float, units: tuple[tuple[str, int], ...]) -> str:
    for name, size in units:
        if number >= size and number % size == 0:
            return f"{int(number // size)}{name}"
    return f"{number:g}{units[-1][0]}"


def cell(text: str) -> str:
    """A text as a cell of a table has it: one line, without what would end the cell or begin a tag."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def tables(schema: Schema) -> str:
    """Every section of the schema with its keys, in the order in which a reader meets them."""
    parts = []
    if schema.root is not None:
        parts += ["\n## The whole file\n", section_table(schema, schema.root)]
    for name, places in schema.places.items():
        section, title = schema.definitions[name], schema.title(name)
        parts.append(f"\n{'##' if schema.root is not None else '###'} {_heading(title, places)} {{#{name.lower()}}}\n")
        if places[1:]:
            parts.append(f"Also at {', '.join(f'`{place}`' for place in places[1:])}.\n")
        if section.get("description"):
            parts.append(section["description"] + "\n")
        parts.append(section_table(schema, section))
    return "\n".join(parts) + "\n"


def _heading(title: str, places: list[str]) -> str:
    """The title of a section, with its place where the title is only its kind."""
    return f"`{places[0]}`, {title}" if places and not title.startswith("`") else title


def section_table(schema: Schema, section: dict[str, Any]) -> str:
    """The keys of one section, a row each."""
    required = section.get("required", ())
    rows = ["| key | value | default | meaning |", "|---|---|---|---|"]
    for key, value in section["properties"].items():
        default = "required" if key in required and "default" not in value else _default(value)
        rows.append(f"| `{key}` | {schema.words(value)} | {default} | {cell(value.get('description', ''))} |")
    return "\n".join(rows) + "\n"
