"""The registry of models: Headrace's own by name, and a user's module by "package.module:Class".

Checking a spec must not need torch, so this module does not import it. A model is imported when it is built.
To add a model: one file beside this one, its settings in `settings.py`, one line in `MODELS`.
"""

import difflib
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from headrace.config import Section, validate
from headrace.errors import SpecError
from headrace.trainer.config import ModelSection
from headrace.trainer.models import needs, settings, slot_settings
from headrace.trainer.models.class_check import split_class
from headrace.trainer.models.needs import Need

if TYPE_CHECKING:
    from torch import nn

    from headrace.trainer.models.contract import Shape


@dataclass(frozen=True, slots=True)
class RegisteredModel:
    """One of Headrace's own models."""

    target: str
    """"module:Class", a module of this folder."""
    settings: type[Section]
    needs: tuple[Need, ...]
    """Its requirements on the slots."""
    finds: Callable[["Shape", Any], object] | None = None
    """Finds the slots that its settings name; raises SpecError."""
    is_tower: bool = False
    """Whether it has a `tower` (trainer.models.contract)."""

    def load(self) -> Callable[["Shape", Any], "nn.Module"]:
        """Its class, which needs torch."""
        module, _, name = self.target.partition(":")
        loaded: Callable[[Shape, Any], nn.Module] = getattr(importlib.import_module(f"{__package__}.{module}"), name)
        return loaded


VECTORS, VALUES = needs.vectors_of_one_length, needs.some_values
MODELS: Mapping[str, RegisteredModel] = {
    "lr": RegisteredModel("lr:LogisticRegression", settings.LrSettings, (needs.some_slot, needs.first_order)),
    "fm": RegisteredModel("fm:FactorizationMachine", settings.FmSettings, (needs.first_order, VECTORS)),
    "deepfm": RegisteredModel("deepfm:DeepFm", settings.DeepFmSettings, (VECTORS,), is_tower=True),
    "wide_deep": RegisteredModel("wide_deep:WideDeep", settings.WideDeepSettings, (VALUES,), is_tower=True),
    "deep_crossing": RegisteredModel(
        "deep_crossing:DeepCrossing", settings.DeepCrossingSettings, (VALUES,), is_tower=True
    ),
    "dcn": RegisteredModel("dcn:Dcn", settings.DcnSettings, (VALUES,)),
    "dcn_v2": RegisteredModel("dcn_v2:DcnV2", settings.DcnV2Settings, (VALUES,)),
    "dlrm": RegisteredModel("dlrm:Dlrm", settings.DlrmSettings, (VECTORS,)),
    "finalmlp": RegisteredModel(
        "finalmlp:FinalMlp", settings.FinalMlpSettings, (VALUES,), slot_settings.context_shapes
    ),
    "din": RegisteredModel("din:Din", settings.DinSettings, (VALUES,), slot_settings.din_slots),
    "sasrec": RegisteredModel("sasrec:Sasrec", settings.SasrecSettings, (VALUES,), slot_settings.sasrec_slots),
    "two_tower": RegisteredModel(
        "two_tower:TwoTower", settings.TwoTowerSettings, (VALUES,), slot_settings.tower_shapes
    ),
    "mmoe": RegisteredModel("mmoe:Mmoe", settings.MmoeSettings, (VALUES,)),
    "esmm": RegisteredModel("esmm:Esmm", settings.EsmmSettings, (VALUES, needs.two_tasks)),
}

OF_CLASSES: Mapping[str, RegisteredModel] = {
    "next_item": RegisteredModel("next_item:NextItem", settings.NextItemSettings, (VALUES,), slot_settings.user_shape),
}
"""Models of a task with loss "softmax", which say which of many classes is the right one."""
ALL_MODELS: Mapping[str, RegisteredModel] = {**MODELS, **OF_CLASSES}


def check_section(section: ModelSection, shape: "Shape") -> None:
    """Raise SpecError if the name is unknown, its settings are wrong, or the slots do not fit.

    For a user's class only the form is checked; `finding.check_class` looks for the class.
    """
    if section.name is None:
        split_class(section.class_path or "")
        return
    entry = _entry(section.name)
    given = _checked(entry.settings, section.settings)
    for need in entry.needs:
        need(shape, section.name)
    if entry.finds is not None:
        entry.finds(shape, given)


def load_model(section: ModelSection, shape: "Shape", folder: Path) -> "nn.Module":
    """Build the model of a spec. A user's module is imported from `folder`, the spec's folder. Raises SpecError."""
    if section.name is not None:
        check_section(section, shape)
        entry = _entry(section.name)
        return entry.load()(shape, _checked(entry.settings, section.settings))
    return _users(section, shape, folder)


def _entry(name: str) -> RegisteredModel:
    if name not in ALL_MODELS:
        near = difflib.get_close_matches(name, ALL_MODELS, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        known = ", ".join(ALL_MODELS)
        raise SpecError(
            f'no model {name!r}; {hint}known: {known}; for one of your own, class = "package.module:Class"',
            "model.name",
        )
    return ALL_MODELS[name]


def _checked(model: type[Section], raw: Mapping[str, Any]) -> Section:
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
    given = _users_settings(found, section)
    try:
        inspect.signature(found).bind(shape, given)
    except TypeError as error:
        raise SpecError(f"{section.class_path} is built as Class(shape, settings): {error}", "model.class") from None
    return found(shape, given)


def _users_settings(found: type, section: ModelSection) -> Section | dict[str, Any]:
    declared = getattr(found, "Settings", None)
    if declared is None:
        return dict(section.settings)
    if not (isinstance(declared, type) and issubclass(declared, Section)):
        raise SpecError(f"{section.class_path}.Settings is no headrace.config.Section", "model.class")
    return _checked(declared, section.settings)


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
