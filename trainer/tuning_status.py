"""The choices of a new job as its status shows them, and as the process that tries settings reports them."""

from msgspec import Struct

PROGRESS = "progress.json"
"""File in the store of the trials: a TuningStatus, at last with all settings."""


class TriedStatus(Struct, frozen=True, kw_only=True):
    """A setting that a new job tried; see trainer.tuning_config.TriedSetting."""

    name: str = ""
    keys: dict[str, bool | int | float | str] = {}
    events: int = 0
    logloss: float | None = None
    auc: float | None = None


class ChosenPairStatus(Struct, frozen=True, kw_only=True):
    """A pair of slots that a new job chose; see trainer.cross_config.ChosenPair."""

    of: list[str] = []
    gain: float = 0.0


class ChosenCrossesStatus(Struct, frozen=True, kw_only=True):
    """The crosses that a new job chose; see trainer.cross_config.CrossChoice."""

    pairs: list[ChosenPairStatus] = []
    samples: int = 0
    auc: float | None = None
    auc_with: float | None = None
    first_order_rate: float = 1.0


class TuningStatus(Struct, frozen=True, kw_only=True):
    """The choices of a new job: how far they are, or the settings that it tried, and its crosses."""

    trial: int = 0
    """Number of the trial that runs, from 1; 0: none does."""
    of: int = 0
    """Trials in all; a last one may be added."""
    name: str = ""
    """The setting that is tried, or what else is done to choose; empty once the job has chosen."""
    tried: list[TriedStatus] = []
    """All settings, the chosen one first; empty before the end."""
    crosses: ChosenCrossesStatus | None = None
    """None: the job has not chosen any."""

    @property
    def step(self) -> str:
        """The present step in words; empty once the job has chosen."""
        return f"trial {self.trial} of {self.of}: {self.name}" if self.trial else self.name
