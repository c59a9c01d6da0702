"""A model whose predictions depend on the mode is known, and its samples are measured in inference mode."""

import pytest
import torch
import torch.nn.functional as functional
from torch import nn

from headrace.trainer.models.module_checks import depends_on_mode


class OwnDropout(nn.Module):
    """Asks for the mode itself, in a method that `forward` calls."""

    def forward(self, x):
        return self.dropped(x)

    def dropped(self, x):
        return functional.dropout(x, 0.5, self.training)


class Plain(nn.Module):
    """Trains."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x):
        return self.layer(x)


class Subclass(OwnDropout):
    def forward(self, x):
        return x + self.dropped(x)


class Nested(nn.Module):
    def forward(self, x):
        return [functional.dropout(each, 0.5, self.training) for each in x]


DEPEND = [
    nn.Dropout(0.1),
    nn.BatchNorm1d(2),
    OwnDropout(),
    Subclass(),
    Nested(),
    nn.Sequential(Plain(), nn.Dropout(0.5)),
]
DO_NOT = [Plain(), nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Dropout(0.0)), nn.LayerNorm(2), nn.Embedding(3, 2)]


@pytest.mark.parametrize("model", DEPEND, ids=lambda model: type(model).__name__)
def test_a_model_that_depends_on_the_mode_is_known(model):
    assert depends_on_mode(nn.Sequential(nn.Linear(2, 2), model))


@pytest.mark.parametrize("model", DO_NOT, ids=lambda model: type(model).__name__)
def test_other_models_pay_nothing(model):
    assert not depends_on_mode(model)


def test_models_of_headrace_depend_on_it_with_dropout_only():
    from headrace.trainer.models.layers import Mlp

    assert not depends_on_mode(Mlp(4, (3, 2))) and depends_on_mode(Mlp(4, (3, 2), 0.1))
    assert Mlp(4, (3, 2), 0.1)(torch.ones(1, 4)).shape == (1, 2)
