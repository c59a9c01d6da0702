"""Replicas: their options, their certificates, and the process that serves predictions."""

from headrace.trainer.replica.config import ReplicaConfig
from headrace.trainer.replica.feed_address import certified

__all__ = ["ReplicaConfig", "certified", "serve"]


def serve(config: ReplicaConfig) -> None:
    """Serve until a signal. Raises SpecError."""
    from headrace.trainer.replica.replica import (
        run,
    )  # loads onnxruntime and a web server, which other commands do not need

    run(config)
