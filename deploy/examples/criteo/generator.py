"""A line of Kaggle's display advertising format to a sample.

A line is `label I1 .. I13 C1 .. C26`, tab separated; any I (integer) or C (hexadecimal) may be empty.
In a shell: zcat data/criteo_80k.txt.gz | head -2 | python generator.py --spec job.toml
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dataset.generator import DataGenerator

NUM_INTEGERS, NUM_CATEGORIES = 13, 26


def step(value: int) -> int:
    """Integers in steps that widen: small ones as they are, large ones by the square of their logarithm."""
    return value + 4 if value < 3 else int(math.log(value) ** 2) + 7


class Clicks(DataGenerator):
    """See module docstring."""

    def generate(self, event: bytes) -> Iterator[Mapping[str, Sequence[Any]]]:
        fields = event.decode().rstrip("\r\n").split("\t")
        if len(fields) != 1 + NUM_INTEGERS + NUM_CATEGORIES:
            raise ValueError(f"{len(fields)} fields instead of {1 + NUM_INTEGERS + NUM_CATEGORIES}")
        integers = [int(text) if text else None for text in fields[1 : 1 + NUM_INTEGERS]]
        sample: dict[str, Sequence[Any]] = {
            "integers": [math.log1p(max(value, 0)) if value is not None else 0.0 for value in integers],
            "click": [float(fields[0])],
        }
        for number, value in enumerate(integers, 1):
            sample[f"I{number}"] = [0 if value is None else max(1, step(value))]
        for number, text in enumerate(fields[1 + NUM_INTEGERS :], 1):
            sample[f"C{number}"] = [int(text, 16)] if text else []
        yield sample


if __name__ == "__main__":
    Clicks().run()
