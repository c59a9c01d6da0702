"""Dense features that may not be written, as those from Arrow, come to the model without a warning of torch's."""

import warnings

import numpy as np
import torch

from trainer.inputs import writable


def test_what_is_read_only_is_copied_and_nothing_else_is():
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert writable(values) is values
    values.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tensor = torch.from_numpy(writable(values))
    assert tensor.tolist() == values.tolist()
