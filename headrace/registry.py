"""Classes by name: Headrace's own, and those that installed packages register as entry points.

A package names its classes in a group of its pyproject.toml, as Headrace's registries name theirs:

    [project.entry-points."headrace.sources"]
    clicks = "my_package.clicks:ClicksSource"

Code of others runs only where an operator has installed it, and a class is imported when it is first asked for. A
package that cannot be loaded, or whose name another one has, is an error of those who use the name alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import Annotated, Any, Generic, Literal, TypeVar, Union, get_args

from pydantic import AfterValidator, Field, create_model

from headrace.config import Section
from headrace.errors import SpecError
from headrace.validation import nearest

Registered = TypeVar("Registered")


@dataclass(frozen=True)
class Registry(Generic[Registered]):
    """The classes of one kind."""

    kind: str
    """The kind, as a message calls it: "source"."""
    group: str
    """The group of entry points in which packages register theirs."""
    base: type[Registered]
    """The class that all of them extend."""
    own: Mapping[str, str]
    """Headrace's, each as "module:Class" below `headrace`."""

    @cached_property
    def _entries(self) -> dict[str, list[EntryPoint]]:
        found = {name: [EntryPoint(name, f"headrace.{target}", self.group)] for name, target in self.own.items()}
        for each in _installed().select(group=self.group):
            found.setdefault(each.name, []).append(each)
        return found

    def names(self) -> list[str]:
        """All names; nothing is imported."""
        return list(self._entries)

    def load(self, name: str) -> type[Registered]:
        """The class of a name. Raises SpecError, which names the package that is to blame, or the names there are."""
        if name not in self._entries:
            raise SpecError(f"no {self.kind} {name!r}; {nearest(name, self._entries)}")
        entry, *others = self._entries[name]
        if others:
            owners = " and ".join(map(_owner, (entry, *others)))
            raise SpecError(f"{self.kind} {name!r} is of two packages, {owners}: uninstall one of them")
        try:
            found = entry.load()
        except Exception as error:  # noqa: BLE001 - code of others
            problem = f"which cannot be loaded: {type(error).__name__}: {error}"
            raise SpecError(f"{self.kind} {name!r} is of {_owner(entry)}, {problem}") from error
        if not (isinstance(found, type) and issubclass(found, self.base)):
            wanted = f"{self.base.__module__}.{self.base.__name__}"
            raise SpecError(f"{self.kind} {name!r} is of {_owner(entry)}: {entry.value} is no {wanted}")
        return found

    def union(self) -> Any:
        """The type of a section that is one of these classes, by its key `kind`."""
        choices = tuple(map(self._choice, self.names()))
        return Annotated[Union[choices], Field(discriminator="kind")]  # noqa: UP007 - of a number known here alone

    def _choice(self, name: str) -> type[Section]:
        try:
            found = self.load(name)
            assert issubclass(found, Section), "the registry is of sections"
            if get_args(found.model_fields["kind"].annotation) != (name,):
                owner = _owner(self._entries[name][0])
                raise SpecError(f'{self.kind} {name!r} is of {owner}: {found.__name__} lacks kind: Literal["{name}"]')
        except SpecError as error:
            return _refused(name, str(error))
        return found


@cache
def _installed() -> Any:
    """All entry points of installed packages; read once, before any job adds its folder to the path."""
    return entry_points()


def _owner(entry: EntryPoint) -> str:
    return "Headrace" if entry.dist is None else f"package {entry.dist.name} {entry.dist.version}"


def _refused(name: str, why: str) -> type[Section]:
    """A section of this kind that nobody can use, and says why."""

    def refuse(kind: str) -> str:
        raise ValueError(why)

    kind: Any = Annotated[Literal[name], AfterValidator(refuse)]
    return create_model(f"Refused_{name}", __base__=Section, kind=kind)
