"""An event of the simulated click stream to one sample for each item shown.

In a shell: echo '{"ts":1,"user":17,"device":2,"hour":0,"shown":[8],"topics":[3],"clicked":[1]}' |
python generator.py --spec job.toml
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dataset.generator import DataGenerator

TOPICS = 1 << 16
"""A crossed sign is the user times this, plus the topic."""


class Clicks(DataGenerator):
    """See module docstring."""

    def generate(self, event: bytes) -> Iterator[Mapping[str, Sequence[Any]]]:
        shown = json.loads(event)
        for item, topic, clicked in zip(shown["shown"], shown["topics"], shown["clicked"], strict=True):
            yield {
                "user": [shown["user"]],
                "item": [item],
                "topic": [topic],
                "device": [shown["device"]],
                "hour": [shown["hour"]],
                "user_topic": [shown["user"] * TOPICS + topic],
                "click": [float(clicked)],
            }


if __name__ == "__main__":
    Clicks().run()
