"""Paddle's data generators under their own names.

With `from headrace.dataset import paddle as fleet` they run unchanged.

Values are printed in the order in which a sample names its slots, as in Paddle; the spec must list the slots in that
order. An empty slot is printed as a count of 0 (in Paddle it is an error). With pipe.extra = "drop", slots that the
spec lacks are not printed. Interface: paddle.distributed.fleet.data_generator.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from headrace.dataset.generator import DataGenerator

__all__ = ["DataGenerator", "MultiSlotDataGenerator", "MultiSlotStringDataGenerator"]


class _Pairs(DataGenerator):
    """Samples as lists of (name, values)."""

    def __init__(self) -> None:
        super().__init__()
        self._kept = self._kept_names()

    def _pairs(self, sample: Iterable[tuple[str, Sequence[Any]]]) -> list[tuple[str, Sequence[Any]]]:
        pairs = list(sample)
        if not all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs):
            raise ValueError("a sample is a list of (name, values), for example [('words', [19, 26]), ('label', [1])]")
        return pairs if self._kept is None else [pair for pair in pairs if pair[0] in self._kept]


class MultiSlotStringDataGenerator(_Pairs):
    """Values are texts, printed unchanged."""

    def _gen_str(self, sample: Iterable[tuple[str, Sequence[Any]]]) -> str:
        return (
            " ".join(f"{len(values)} {' '.join(values)}" if values else "0" for _, values in self._pairs(sample)) + "\n"
        )


class MultiSlotDataGenerator(_Pairs):
    """Values are numbers. The first sample fixes the names of the slots; a slot with a float becomes a float slot."""

    def __init__(self) -> None:
        super().__init__()
        self._proto_info: list[tuple[str, str]] | None = None

    def _gen_str(self, sample: Iterable[tuple[str, Sequence[Any]]]) -> str:
        pairs = self._pairs(sample)
        if self._proto_info is None:
            self._proto_info = [(name, "uint64") for name, _ in pairs]
        if [name for name, _ in pairs] != [name for name, _ in self._proto_info]:
            raise ValueError(
                f"the slots of a sample are {[name for name, _ in pairs]}; "
                f"those of the first sample were {[name for name, _ in self._proto_info]}"
            )
        words: list[str] = []
        for index, (name, values) in enumerate(pairs):
            words.append(str(len(values)))
            for value in values:
                if isinstance(value, float):
                    self._proto_info[index] = name, "float"
                elif not isinstance(value, int):
                    raise ValueError(f"slot {name!r}: {value!r} is neither int nor float")
                words.append(str(value))
        return " ".join(words) + "\n"
