"""The section `cluster` of a job spec: how many processes a job has, and how often they restart."""

from pydantic import Field, field_validator, model_validator

from millrace.config import Duration, Section, Size


class ClusterSection(Section):
    """How many processes of each role."""

    trainers: int = Field(default=1, ge=1, le=64)
    """Trainer processes."""
    shards: int | None = Field(default=None, ge=0, le=64)
    """Shard processes; 0: the shard lives in the trainer. Unless set: 0 with one trainer, else 1."""
    max_message: Size = 256 << 20
    """Longest message between a trainer and a shard. The rows of one step on one shard must fit."""
    max_restarts: int = Field(default=5, ge=0, le=1000)
    """Restarts of the workers within `restart_window` after which the next death ends the job. 0: never restart."""
    restart_window: Duration = 600.0
    """The time over which restarts are counted."""

    @model_validator(mode="after")
    def _reachable(self) -> "ClusterSection":
        if self.shards == 0 and self.trainers > 1:
            raise ValueError(
                f"shards = 0 keeps the rows inside the one trainer; {self.trainers} trainers need shards = 1 or more"
            )
        return self

    @field_validator("max_message")
    @classmethod
    def _within_grpc(cls, max_message: int) -> int:
        if not 1 << 20 <= max_message < 2 << 30:
            raise ValueError("must be at least 1MiB and less than 2GiB")
        return max_message

    @property
    def num_shards(self) -> int:
        """Shard processes to start; 0: the shard is embedded."""
        if self.shards is not None:
            return self.shards
        return 0 if self.trainers == 1 else 1
