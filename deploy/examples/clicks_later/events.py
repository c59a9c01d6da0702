"""Writes a made-up click stream as two: impressions, and their clicks, which come minutes later.

    python deploy/examples/clicks_later/events.py --impressions 200000

`impressions.jsonl` and `clicks.jsonl` are in the order of event time; `impression` is the number of an impression in
both. A click comes `--delay` seconds after its impression on average, exponentially spread. `labelled.jsonl` has the
same impressions with their labels, as if all were known at once. All of it is a function of `--seed`.
"""

import argparse
import json
from pathlib import Path

import numpy as np

START_S, DAY_S = 1_704_067_200, 86_400
USERS, ITEMS, TOPICS, DEVICES = 5_000, 1_000, 20, 4
A_DAY = 500_000
"""Impressions in a day of event time."""


def write(folder: Path, num: int, delay_s: float, seed: int) -> None:
    """Write the three files."""
    rng = np.random.default_rng(seed)
    at_s = np.round(START_S + np.arange(num) * DAY_S / A_DAY, 3)
    user, item = (USERS * rng.random(num) ** 1.5).astype(int), (ITEMS * rng.random(num) ** 2).astype(int)
    topic = rng.integers(TOPICS, size=ITEMS)[item]
    device, hour = rng.integers(DEVICES, size=num), (at_s.astype(int) // 3600) % 24
    taste = rng.normal(0, 0.9, (USERS, TOPICS))[user, topic]
    logit = -1.9 + rng.normal(0, 1.1, ITEMS)[item] + rng.normal(0, 0.6, (TOPICS, DEVICES))[topic, device] + taste
    clicked = rng.random(num) < 1 / (1 + np.exp(-logit))
    click_s = np.round(at_s + 1.0 + rng.exponential(delay_s, num), 3)

    columns = {"ts": at_s, "impression": np.arange(num), "user": user, "item": item, "topic": topic}
    columns |= {"device": device, "hour": hour, "click": clicked.astype(int)}
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "impressions.jsonl").open("w") as bare, (folder / "labelled.jsonl").open("w") as labelled:
        for values in zip(*(column.tolist() for column in columns.values()), strict=True):
            line = dict(zip(columns, values, strict=True))
            labelled.write(f"{json.dumps(line)}\n")
            del line["click"]
            bare.write(f"{json.dumps(line)}\n")
    with (folder / "clicks.jsonl").open("w") as clicks:
        for number in np.flatnonzero(clicked)[np.argsort(click_s[clicked], kind="stable")].tolist():
            clicks.write(f"{json.dumps({'ts': float(click_s[number]), 'impression': number, 'click': 1})}\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Writes impressions, and clicks that come later.")
    parser.add_argument("--impressions", type=int, default=200_000)
    parser.add_argument("--delay", type=float, default=240.0, help="average delay of a click, in seconds")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "data")
    arguments = parser.parse_args()
    write(arguments.out, arguments.impressions, arguments.delay, arguments.seed)
