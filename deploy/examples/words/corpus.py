"""Writes a made-up corpus: sentences of words that come as often as Zipf's law says, each sentence about one topic.

Words are numbers, the most common one is 0. Word w is of topic w modulo TOPICS; in a sentence half of the words, on
average, are of its topic, and the others are of any.
"""

import argparse
from pathlib import Path

import numpy as np

TOPICS = 50
LENGTH = 20
"""Words of a sentence."""
AT_ONCE = 10_000
"""Sentences made at a time."""


def sentences(count: int, num_words: int, seed: int) -> np.ndarray:
    """(count, LENGTH) words."""
    draw = np.random.default_rng([seed, count])
    edges = np.cumsum(1 / np.arange(1, num_words + 1))
    word = np.searchsorted(edges, draw.random((count, LENGTH)) * edges[-1])
    topic = draw.integers(TOPICS, size=(count, 1))
    return np.where(draw.random((count, LENGTH)) < 0.5, word - word % TOPICS + topic, word)


def write(to: Path, count: int, num_words: int) -> None:
    """A file with a sentence a line."""
    to.parent.mkdir(parents=True, exist_ok=True)
    with to.open("w") as lines:
        for number in range(0, count, AT_ONCE):
            made = sentences(min(AT_ONCE, count - number), num_words, number)
            lines.writelines(" ".join(map(str, each)) + "\n" for each in made.tolist())


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--sentences", type=int, default=50_000)
    arguments.add_argument("--words", type=int, default=20_000)
    given = arguments.parse_args()
    write(Path(__file__).parent / "data" / "corpus.txt", given.sentences, given.words)
