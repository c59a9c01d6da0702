"""Weights of a model for other slots: which places of which weights are kept, are new, or are cut.

A model names the places of its weights along each axis (`slot_axes` of trainer.models.contract). Pure arithmetic on
indices; trainer.train.commit_state applies it to a commit.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import SpecError
from headrace.trainer.models.contract import Axis, SlotAxes

Sizes = tuple[int, ...]
Places = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Places along an axis of the old weight, and their places in the new one."""
Axes = Callable[[], SlotAxes] | None
"""The method `slot_axes` of a model; None if it has none."""
START = "; choose another store.path, start over with --fresh, or import the rows: `headrace import`"


class NotCarried(SpecError):
    """The weights of a model do not fit other slots: it is a new model."""

    def __init__(self, why: str) -> None:
        super().__init__(f"with these slots the model is a new one: {why}{START}", "slots")


@dataclass(frozen=True, slots=True)
class CarriedWeight:
    """One weight of both models, or of one of them."""

    name: str
    old: Sizes | None
    """Its shape; None: the old model lacks it, so it begins at its initial value."""
    new: Sizes | None
    """None: the new model lacks it, so it is dropped."""
    places: tuple[Places | None, ...] = ()
    """By axis; None: the same places."""

    @property
    def changes(self) -> bool:
        """Whether it is other than before."""
        return self.old != self.new or any(places is not None for places in self.places)

    @property
    def num_kept(self) -> int:
        """Number of values that are kept."""
        if self.old is None or self.new is None:
            return 0
        sizes = zip(self.places, self.new, strict=True)
        return math.prod(size if places is None else len(places[0]) for places, size in sizes)

    def apply(self, value: NDArray[Any], fill: NDArray[Any] | float) -> NDArray[Any]:
        """The new weight, from the old one; new places have the values of `fill`."""
        assert self.new is not None and value.shape == self.old, "of both models"
        made = np.empty(self.new, value.dtype)
        made[...] = fill
        sizes = zip(self.places, self.new, strict=True)
        there = [(np.arange(size), np.arange(size)) if places is None else places for places, size in sizes]
        made[np.ix_(*(each[1] for each in there))] = value[np.ix_(*(each[0] for each in there))]
        return made


def carried_weights(
    old: tuple[Mapping[str, Sizes], Axes],
    new: tuple[Mapping[str, Sizes], Axes],
    added: Collection[str],
    removed: Collection[str],
) -> list[CarriedWeight]:
    """The weights of both models, by their shapes and their `slot_axes`. Raises NotCarried."""
    if old[1] is None or new[1] is None:
        raise NotCarried("it does not say which of its weights depend on the slots (slot_axes, see docs/models.md)")
    (old_sizes, old_axes), (new_sizes, new_axes) = (old[0], old[1]()), (new[0], new[1]())
    found = []
    for name in dict.fromkeys((*old_sizes, *new_sizes)):
        was, now = old_sizes.get(name), new_sizes.get(name)
        if was is None or now is None:
            found.append(CarriedWeight(name, was, now))
            continue
        axes = _axes_of(name, old_axes, was), _axes_of(name, new_axes, now)
        places = [
            _places(f"{name}, axis {number}", *pair, added, removed)
            for number, pair in enumerate(zip(*axes, was, now, strict=True))
        ]
        found.append(CarriedWeight(name, was, now, tuple(places)))
    return found


def _axes_of(name: str, axes: SlotAxes, sizes: Sizes) -> Sequence[Axis | None]:
    """The axes of a weight. Raises NotCarried where they are not those of its shape."""
    found = axes.get(name, (None,) * len(sizes))
    told = [None if axis is None else sum(part.size for part in axis) for axis in found]
    if len(told) != len(sizes) or any(one not in (None, size) for one, size in zip(told, sizes, strict=False)):
        raise NotCarried(f"{name} has the shape {list(sizes)}, and slot_axes says {told}")
    return found


def _places(
    where: str, old: Axis | None, new: Axis | None, was: int, now: int, added: Collection[str], removed: Collection[str]
) -> Places | None:
    if old is None and new is None:
        if was != now:
            raise NotCarried(f"{where} had {was} places and has {now}, and slot_axes does not name them")
        return None
    if old is None or new is None:
        raise NotCarried(f"{where} has places for slots in one of the models only")
    old_begin, new_begin = _begins(old), _begins(new)
    if len(old_begin) < len(old) or len(new_begin) < len(new):
        raise NotCarried(f"{where}: slot_axes names some places twice")
    sizes = {part.name: part.size for part in old}
    for part in new:
        if sizes.get(part.name, part.size) != part.size:
            raise NotCarried(f"{where}: {part.name} had {sizes[part.name]} places and has {part.size}")
        if part.name not in old_begin and not part.slots & set(added):
            raise NotCarried(f"{where}: {part.name} is new, and no slot of it was added")
    for part in old:
        if part.name not in new_begin and not part.slots & set(removed):
            raise NotCarried(f"{where}: {part.name} is gone, and no slot of it was removed")
    both = [part for part in new if part.name in old_begin]
    if len(both) == len(old) == len(new) and list(old_begin) == list(new_begin):
        return None
    nothing = np.empty(0, np.int64)
    return (
        np.concatenate([nothing, *(np.arange(part.size) + old_begin[part.name] for part in both)]),
        np.concatenate([nothing, *(np.arange(part.size) + new_begin[part.name] for part in both)]),
    )


def _begins(axis: Axis) -> dict[str, int]:
    begins, at = {}, 0
    for part in axis:
        begins[part.name] = at
        at += part.size
    return begins
