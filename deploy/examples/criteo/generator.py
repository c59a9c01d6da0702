"""Turns each line of Kaggle's display advertising format into a sample.

A line is `label I1 .. I13 C1 .. C26`, tab separated; any I (integer) or C (hexadecimal) may be empty.
In a shell: zcat data/criteo_80k.txt.gz | head -2 | python generator.py --spec job.toml
"""

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from headrace import DataGenerator

NUM_INTEGERS, NUM_CATEGORIES = 13, 26


@cache
def dense(text: str) -> float:
    """An integer as a dense value: log(1 + x), 0 if missing."""
    return math.log1p(max(int(text), 0)) if text else 0.0


@cache
def step(text: str) -> int:
    """An integer as a feature id: small ones unchanged, large ones by their squared logarithm; 0 if missing."""
    if not text:
        return 0
    value = int(text)
    return max(1, value + 4 if value < 3 else int(math.log(value) ** 2) + 7)


class Clicks(DataGenerator):
    def generate_columns(self, events: Sequence[bytes]) -> Mapping[str, Any]:
        lines = [event.decode().rstrip("\r\n").split("\t") for event in events]
        for fields in lines:
            if len(fields) != 1 + NUM_INTEGERS + NUM_CATEGORIES:
                raise ValueError(f"{len(fields)} fields instead of {1 + NUM_INTEGERS + NUM_CATEGORIES}")
        label, *fields = zip(*lines, strict=True)
        integers, categories = fields[:NUM_INTEGERS], fields[NUM_INTEGERS:]
        columns: dict[str, Any] = {"event": np.arange(len(events)), "click": [float(text) for text in label]}
        columns["integers"] = np.stack([[dense(text) for text in column] for column in integers], 1)
        for number, column in enumerate(integers, 1):
            columns[f"I{number}"] = [step(text) for text in column]
        for number, column in enumerate(categories, 1):
            columns[f"C{number}"] = [int(text, 16) for text in column if text], [len(text) > 0 for text in column]
        return columns


if __name__ == "__main__":
    Clicks().run()
