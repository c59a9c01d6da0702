"""Read-only dense features, such as those from Arrow, reach the model without a warning of torch."""

import warnings

import numpy as np
import torch

from headrace.trainer.device_copies import writable


def test_only_read_only_values_are_copied():
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert writable(values) is values
    values.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tensor = torch.from_numpy(writable(values))
    assert tensor.tolist() == values.tolist()
