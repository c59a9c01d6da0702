"""The parts of a step that the bench times are there, and are timed."""

from collections import defaultdict

import torch

from headrace.trainer.models import linear
from headrace.trainer.models.linear import Kernel
from tests.bench.step_parts import PARTS, timed


def test_calls_of_parts_are_noted_while_they_are_timed():
    found, x = defaultdict(list), torch.ones(2, 3)
    with timed(found):
        linear.forward_product(Kernel.MKL, x, x, None)
    linear.forward_product(Kernel.MKL, x, x, None)
    assert len(found) == len(PARTS) and sum(map(len, found.values())) == 1
    assert len(found["linear.forward_product"]) == 1
