"""A dense strategy, as a job file names it; checking one needs no torch."""

from headrace.trainer.dense_config import DenseSection, StrategyKind


class NormedKind(StrategyKind):
    """As "all_reduce", with gradients of length 1."""

    implementation = "outside_kinds.normed:NormedDense"

    def refused(self, dense: DenseSection) -> dict[str, bool]:
        return super().refused(dense) | {"clip_norm, as every gradient has length 1": dense.clip_norm is not None}
