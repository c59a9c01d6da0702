"""Turns impressions of a news page into one sample for each article shown; crossed fields if the job has their slots.

In a shell: zcat data/impressions.jsonl.gz | head -2 | python generator.py --spec job.toml
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from headrace import DataGenerator, signs

PLAIN = {
    "user": "user_id",
    "page": "context_article",
    "last_click": "last_click",
    "device": "device_type",
    "sso": "is_sso",
    "subscriber": "is_subscriber",
    "gender": "gender",
    "postcode": "postcode",
    "age": "age",
    "hour": "hour_of_day",
    "weekday": "day_of_week",
    "list_length": "n_inview",
}
CROSSED = ("page", "hour", "weekday", "device", "subscriber", "gender", "postcode", "age")
ARTICLES = np.uint64(1 << 20)
"""A crossed id is the other field's value times this, plus the article."""


class Impressions(DataGenerator):
    def generate_columns(self, events: Sequence[bytes]) -> Mapping[str, Any]:
        impressions = [json.loads(event) for event in events]
        num_shown = np.array([len(each["shown"]) for each in impressions], np.int64)
        article = signs(article for each in impressions for article in each["shown"])

        def of_event(field: str) -> np.ndarray:  # repeated for each article that the impression shows
            return np.repeat(signs(each[field] for each in impressions), num_shown)

        columns: dict[str, Any] = {slot: of_event(field) for slot, field in PLAIN.items()}
        wanted = {slot.name for slot in self.job_slots}
        crossed = [name for name in CROSSED if f"article_{name}" in wanted]
        columns |= {f"article_{name}": columns[name] * ARTICLES + article for name in crossed}
        clicked = [set(each["clicked"]) for each in impressions]
        return columns | {
            "event": np.repeat(np.arange(len(events)), num_shown),
            "article": article,
            "length": np.repeat(num_shown / 10, num_shown),
            "impression": of_event("impression"),
            "click": [a in those for each, those in zip(impressions, clicked, strict=True) for a in each["shown"]],
        }


if __name__ == "__main__":
    Impressions().run()
