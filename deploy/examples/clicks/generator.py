"""Turns events of the simulated click stream into one sample for each item shown.

In a shell: echo '{"ts":1,"user":17,"device":2,"hour":0,"shown":[8],"topics":[3],"clicked":[1]}' |
python generator.py --spec job.toml
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from headrace import DataGenerator, signs

TOPICS = np.uint64(1 << 16)
"""A crossed id is the user times this, plus the topic."""


class Clicks(DataGenerator):
    def generate_columns(self, events: Sequence[bytes]) -> Mapping[str, Any]:
        parsed = [json.loads(event) for event in events]
        num_shown = [len(each["shown"]) for each in parsed]
        shown = [item for each in parsed for item in zip(each["shown"], each["topics"], each["clicked"], strict=True)]

        def of_event(field: str) -> np.ndarray:  # repeated for each item that the event shows
            return np.repeat(signs(each[field] for each in parsed), num_shown)

        user, topic = of_event("user"), signs(topic for _, topic, _ in shown)
        return {
            "event": np.repeat(np.arange(len(events)), num_shown),
            "user": user,
            "item": [item for item, _, _ in shown],
            "topic": topic,
            "device": of_event("device"),
            "hour": of_event("hour"),
            "user_topic": user * TOPICS + topic,
            "click": [float(clicked) for _, _, clicked in shown],
        }


if __name__ == "__main__":
    Clicks().run()
