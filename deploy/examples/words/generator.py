"""Turns sentences into pairs of words that are at most WINDOW places apart.

In a shell: echo '17 4 92 4' | python generator.py --spec job.toml
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from headrace import DataGenerator

WINDOW = 2


class Pairs(DataGenerator):
    def generate_columns(self, events: Sequence[bytes]) -> Mapping[str, Any]:
        words = [event.split() for event in events]
        length = np.array([len(each) for each in words])
        word = np.array([number for each in words for number in each], dtype=np.uint64) + np.uint64(1)
        event, place = np.repeat(np.arange(len(events)), length), np.arange(len(word))
        gaps = [gap for gap in range(-WINDOW, WINDOW + 1) if gap]
        of, near = np.repeat(place, len(gaps)), (place[:, None] + gaps).ravel()
        inside = (near >= 0) & (near < len(word))
        inside[inside] = event[near[inside]] == event[of[inside]]
        of, near = of[inside], near[inside]
        return {"event": event[of], "word": word[of], "near": word[near], "is_near": np.ones(len(of), np.float32)}


if __name__ == "__main__":
    Pairs().run()
