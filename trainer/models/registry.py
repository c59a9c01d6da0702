"""The registry of models: Headrace's own and those of packages by name, and a user's module by "package.module:Class".

Checking a spec must not need torch, so this module does not import it. A model is imported when it is built.
"""

import difflib
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from headrace.config import Section, validate
from headrace.errors import SpecError
from headrace.registry import Registry
from headrace.trainer.config import ModelSection
from headrace.trainer.models.settings import OWN, ModelSettings
from headrace.trainer.user_classes import import_class, split_class

if TYPE_CHECKING:
    from torch import nn

    from headrace.trainer.models.contract import Shape

MODELS = Registry(
    kind="model",
    group="headrace.models",
    base=ModelSettings,
    own={name: f"trainer.models.settings:{section.__name__}" for name, section in OWN.items()},
)


def settings_of(section: ModelSection) -> ModelSettings:
    """The checked settings of a model with a name. Raises SpecError."""
    assert section.name is not None, "a user's class declares its own settings"
    if section.name not in MODELS.names():
        near = difflib.get_close_matches(section.name, MODELS.names(), n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        known = ", ".join(MODELS.names())
        raise SpecError(
            f'no model {section.name!r}; {hint}known: {known}; for one of your own, class = "package.module:Class"',
            "model.name",
        )
    try:
        found = MODELS.load(section.name)
    except SpecError as error:
        raise SpecError(str(error), "model.name") from error
    return _checked(found, section.settings)


def is_of_classes(name: str | None) -> bool:
    """Whether the model with this name is for a task with loss "softmax"."""
    return name is not None and name in MODELS.names() and MODELS.load(name).of_classes


def check_section(section: ModelSection, shape: "Shape") -> None:
    """Raise SpecError if the name is unknown, its settings are wrong, or the slots do not fit.

    For a user's class only the form is checked; `user_classes.check_class` looks for the class.
    """
    if section.name is None:
        split_class(section.class_path or "")
    else:
        settings_of(section).check(shape, section.name)


def load_model(section: ModelSection, shape: "Shape", folder: Path) -> "nn.Module":
    """Build the model of a spec. A user's module is imported from `folder`, the spec's folder. Raises SpecError."""
    if section.name is None:
        return _users(section, shape, folder)
    settings = settings_of(section)
    settings.check(shape, section.name)
    return settings.build(shape)


Settings = TypeVar("Settings", bound=Section)


def _checked(model: type[Settings], raw: Mapping[str, Any]) -> Settings:
    try:
        return validate(model, raw)
    except SpecError as error:
        lines = "\n".join(f"model.settings.{line}".replace(".(spec):", ":", 1) for line in str(error).splitlines())
        raise SpecError(lines) from None


def _users(section: ModelSection, shape: "Shape", folder: Path) -> "nn.Module":
    from torch import nn

    found = import_class(section.class_path or "", folder, "model.class")
    if not issubclass(found, nn.Module):
        raise SpecError(f"{section.class_path} is no torch.nn.Module", "model.class")
    given = _users_settings(found, section, shape)
    try:
        inspect.signature(found).bind(shape, given)
    except TypeError as error:
        raise SpecError(f"{section.class_path} is built as Class(shape, settings): {error}", "model.class") from None
    return found(shape, given)


def _users_settings(found: type, section: ModelSection, shape: "Shape") -> Section | dict[str, Any]:
    declared = getattr(found, "Settings", None)
    if declared is None:
        extended = _own_section(found)
        if extended is None:
            return dict(section.settings)
        settings = _checked(extended, section.settings)
        settings.check(shape, found.__name__)
        return settings
    if not (isinstance(declared, type) and issubclass(declared, Section)):
        raise SpecError(f"{section.class_path}.Settings is no headrace.config.Section", "model.class")
    return _checked(declared, section.settings)


def _own_section(found: type) -> type[ModelSettings] | None:
    """The section of the model of Headrace that a class extends, if it extends one."""
    sections = {f"{__package__}.{section.module}": section for section in OWN.values()}
    names = (f"{each.__module__}:{each.__name__}" for each in found.__mro__)
    return next((sections[name] for name in names if name in sections), None)
