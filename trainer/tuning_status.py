"""The tuning of a new job as its status shows it, and as the process that tries settings reports it."""

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


class TuningStatus(Struct, frozen=True, kw_only=True):
    """The tuning of a new job: how far it is, or the settings that it tried."""

    trial: int = 0
    """Number of the trial that runs, from 1; 0: none does."""
    of: int = 0
    """Trials in all; a last one may be added."""
    name: str = ""
    """The setting that is tried."""
    tried: list[TriedStatus] = []
    """All settings, the chosen one first; empty before the end."""
