"""A type of exported values between int8 and float32."""

import numpy as np
from numpy.typing import NDArray

from headrace.trainer.value_types import F32, ValueType


class Int16(ValueType):
    """Vectors of int16, each with a scale."""

    number = np.dtype(np.int16)
    has_scale = True
    rule = "A vector of int16 is multiplied by its scale."

    def vectors(self, vector_RD: F32) -> tuple[NDArray[np.int16], F32]:
        scale_R = np.abs(vector_RD).max(axis=1, initial=np.float32(0)) / np.float32(32767)
        divisor_R = np.where(scale_R > 0, scale_R, np.float32(np.inf))
        return np.rint(vector_RD / divisor_R[:, None]).astype(np.int16), scale_R
