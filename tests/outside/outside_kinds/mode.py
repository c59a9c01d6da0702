"""A mode of consistency."""

from headrace.pserver.consistency.sync import Sync


class Plain(Sync):
    """As "sync", without keys of its own: those of "sync" are refused beside it."""

    name, own = "plain", {}
