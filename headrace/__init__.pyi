# The names that users' code imports from headrace: for type checkers, and for headrace/__init__.py.

from .config import Section as Section
from .dataset.generator import DataGenerator as DataGenerator
from .dataset.generator import signs as signs
from .errors import HeadraceError as HeadraceError
from .service.python.local_job import Job as Job
from .service.python.local_job import RunFailed as RunFailed
from .service.python.opened_export import Export as Export
from .service.python.replica_client import Replica as Replica
from .service.python.service_connection import AsyncService as AsyncService
from .service.python.service_connection import Service as Service
from .service.python.service_connection import connect as connect
from .service.python.service_connection import connect_async as connect_async
from .trainer.models.contract import Inputs as Inputs
from .trainer.models.contract import SequenceInput as SequenceInput
from .trainer.models.contract import Shape as Shape
from .trainer.models.contract import SlotShape as SlotShape
from .trainer.models.linear import Linear as Linear
from .trainer.own_metrics import Metric as Metric

__version__: str
