"""What a user writes about the processes of a job."""

from pydantic import Field, model_validator

from millrace.config import Section


class ClusterSection(Section):
    """How many processes of each role."""

    trainers: int = Field(default=1, ge=1, le=64)
    """Trainer processes."""
    shards: int | None = Field(default=None, ge=0, le=64)
    """Shard processes; 0: the shard lives in the trainer. Unless set: 0 with one trainer, else 1."""

    @model_validator(mode="after")
    def _reachable(self) -> "ClusterSection":
        if self.shards == 0 and self.trainers > 1:
            raise ValueError(
                f"shards = 0 keeps the rows inside the one trainer; {self.trainers} trainers need shards = 1 or more"
            )
        return self

    @property
    def num_shards(self) -> int:
        """Shard processes to start; 0: the shard is embedded."""
        if self.shards is not None:
            return self.shards
        return 0 if self.trainers == 1 else 1
