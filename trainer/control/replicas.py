"""Replicas: their options, and the process that serves predictions."""

from trainer.replica.config import ReplicaConfig

__all__ = ["ReplicaConfig", "serve"]


def serve(config: ReplicaConfig) -> None:
    """Serve until a signal. Raises SpecError."""
    from trainer.replica.replica import run  # loads onnxruntime and a web server, which other commands do not need

    run(config)
