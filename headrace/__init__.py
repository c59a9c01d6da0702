"""Headrace: streaming training of recommendation models.

What users' code imports is found here by name, and loaded at its first use. The modules of this folder itself are the
shared kernel: what every role needs and no role owns.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.config import Section
    from headrace.dataset.generator import DataGenerator, signs
    from headrace.trainer.metrics.custom import Metric
    from headrace.trainer.models.contract import Inputs, SequenceInput, Shape, SlotShape
    from headrace.trainer.models.linear import Linear

__version__ = "0.2.0"

_PLACES = {
    "DataGenerator": "dataset.generator",
    "Inputs": "trainer.models.contract",
    "Linear": "trainer.models.linear",
    "Metric": "trainer.metrics.custom",
    "Section": "config",
    "SequenceInput": "trainer.models.contract",
    "Shape": "trainer.models.contract",
    "SlotShape": "trainer.models.contract",
    "signs": "dataset.generator",
}
"""Public name -> its module in this package."""

__all__ = [
    "DataGenerator", "Inputs", "Linear", "Metric", "Section", "SequenceInput", "Shape", "SlotShape", "__version__",
    "signs",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PLACES})
