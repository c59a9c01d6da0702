"""An impression of a news page to one sample for each article shown; with --plain, no crossed fields (plain.toml).

In a shell: zcat data/impressions.jsonl.gz | head -2 | python generator.py --spec job.toml
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dataset.generator import DataGenerator

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
ARTICLES = 1 << 20
"""A crossed sign is the other field's value times this, plus the article."""


class Impressions(DataGenerator):
    """See module docstring."""

    def __init__(self, crossed: tuple[str, ...] = CROSSED) -> None:
        super().__init__()
        self._crossed = crossed

    def generate(self, event: bytes) -> Iterator[Mapping[str, Sequence[Any]]]:
        impression = json.loads(event)
        clicked = set(impression["clicked"])
        common = {slot: [impression[field]] for slot, field in PLAIN.items()}
        common["length"] = [len(impression["shown"]) / 10]
        common["impression"] = [float(impression["impression"])]
        for article in impression["shown"]:
            crossed = {f"article_{name}": [impression[PLAIN[name]] * ARTICLES + article] for name in self._crossed}
            yield common | crossed | {"article": [article], "click": [float(article in clicked)]}


if __name__ == "__main__":
    Impressions(() if "--plain" in sys.argv else CROSSED).run()
