"""Lists that lie one after another in one array: offsets and values.

Shapes: L lists, of which P are chosen; N values. List l is `value_N[offset_L1[l]:offset_L1[l + 1]]`.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

I64 = NDArray[np.int64]
Number = TypeVar("Number", bound=np.generic)


def offsets_of(length_L: NDArray[Any]) -> I64:
    """(L,) lengths -> (L + 1,) offsets, from 0."""
    offset_L1: I64 = np.concatenate([np.zeros(1, np.int64), np.cumsum(length_L)])
    return offset_L1


def are_offsets(offset_L1: I64, num_lists: int, num_values: int) -> bool:
    """Whether these are the offsets of so many lists with so many values in all."""
    if len(offset_L1) != num_lists + 1 or offset_L1[0] != 0 or offset_L1[-1] != num_values:
        return False
    return bool((np.diff(offset_L1) >= 0).all())


def places_of_values(offset_L1: I64, at_P: I64) -> tuple[I64, I64]:
    """The offsets of the lists at some places, and the places of their values."""
    length_P = np.diff(offset_L1)[at_P]
    offset_P1 = offsets_of(length_P)
    return offset_P1, np.arange(offset_P1[-1]) + np.repeat(offset_L1[at_P] - offset_P1[:-1], length_P)


def pick(offset_L1: I64, value_N: NDArray[Number], at_P: I64) -> tuple[I64, NDArray[Number]]:
    """The lists at some places, as offsets and values."""
    offset_P1, place_N = places_of_values(offset_L1, at_P)
    return offset_P1, value_N[place_N]


def joined_lists(parts: Sequence[tuple[I64, NDArray[Number]]]) -> tuple[I64, NDArray[Number]]:
    """The lists of several parts as one: offsets and values."""
    lengths = np.concatenate([np.diff(offset_L1) for offset_L1, _ in parts])
    return offsets_of(lengths), np.concatenate([value_N for _, value_N in parts])
