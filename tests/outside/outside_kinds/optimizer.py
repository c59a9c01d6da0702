"""An optimizer of the dense parameters that uses the signs of gradients alone (Bernstein et al. 2018)."""

from typing import Literal

from headrace.trainer.dense_optimizers import DenseOptimizer


class Signs(DenseOptimizer):
    """Steps of one size, in the direction of the mean of the gradients."""

    state = frozenset({"mean"})

    kind: Literal["signs"]
    """Signs."""
    lr: float = 0.001
    """Size of a step."""
    memory: float = 0.9
    """Decay of the mean."""

    def learn(self, weights, gradient, state, lr, segments):
        mean = state.setdefault("mean", gradient.new_zeros(gradient.shape))
        mean.lerp_(gradient, 1 - self.memory)
        weights.sub_(mean.sign(), alpha=lr)
