"""A plugin of mypy: `dataclasses.replace` and its like are refused for a msgspec.Struct.

To mypy a Struct is a dataclass, so it lets them pass; they raise TypeError when they run. msgspec.structs has their
like for a Struct.
"""

from collections.abc import Callable

from mypy.plugin import FunctionContext, Plugin
from mypy.types import Instance, Type, UnionType, get_proper_type

OF_STRUCTS = {
    "dataclasses.replace": "msgspec.structs.replace",
    "dataclasses.asdict": "msgspec.structs.asdict",
    "dataclasses.astuple": "msgspec.structs.astuple",
    "dataclasses.fields": "msgspec.structs.fields",
}


class StructCalls(Plugin):
    """Looks at each call of those functions."""

    def get_function_hook(self, fullname: str) -> Callable[[FunctionContext], Type] | None:
        if (better := OF_STRUCTS.get(fullname)) is None:
            return None

        def check(call: FunctionContext) -> Type:
            for given in call.arg_types[0]:
                for kind in _members(get_proper_type(given)):
                    if isinstance(kind, Instance) and kind.type.has_base("msgspec.Struct"):
                        call.api.fail(f"{kind.type.name} is a Struct: use {better}", call.context)
            return call.default_return_type

        return check


def _members(given: Type) -> list[Type]:
    return [get_proper_type(each) for each in given.items] if isinstance(given, UnionType) else [given]


def plugin(_version: str) -> type[Plugin]:
    """Called by mypy."""
    return StructCalls
