# The names that users' code imports from headrace: for type checkers, and for headrace/__init__.py.

from .config import Section as Section
from .dataset.generator import DataGenerator as DataGenerator
from .dataset.generator import signs as signs
from .trainer.models.contract import Inputs as Inputs
from .trainer.models.contract import SequenceInput as SequenceInput
from .trainer.models.contract import Shape as Shape
from .trainer.models.contract import SlotShape as SlotShape
from .trainer.models.linear import Linear as Linear
from .trainer.own_metrics import Metric as Metric

__version__: str
