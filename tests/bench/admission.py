"""How many keys a second admission decides on one core: steps of 20,000 keys that were never seen, and of known ones.

`python -m tests.bench.admission` prints JSON. Counts are of 16 MiB; keys come in random order, as in a stream.
"""

import argparse
import json
import time
from typing import Any

import numpy as np

from headrace.keys import NUM_BUCKETS
from headrace.pserver.admission import Admission
from headrace.pserver.config import TableSection
from tests.bench import filled

STEP_KEYS, STEPS = 20_000, 100
ASKED_M_KEYS_S = 5.0
ENTRIES: dict[str, list[dict[str, Any]]] = {
    "count": [{"kind": "count", "n": 4}],
    "count, exact": [{"kind": "count", "n": 4, "exact": True}],
    "show_click": [{"kind": "show_click", "score": 1.0}],
    "show_click, exact": [{"kind": "show_click", "score": 1.0, "exact": True}],
    "probability": [{"kind": "probability", "p": 0.25}],
    "probability and count": [{"kind": "probability", "p": 0.25}, {"kind": "count", "n": 4}],
}


def rate(entries: list[dict[str, Any]], steps: int, *, repeated: bool) -> dict[str, float]:
    """Millions of keys a second, by the median step; `repeated`: of keys out of the first ten steps."""
    section = TableSection.model_validate({"admission": entries})
    admission = Admission.of(section.admission, nonclk_coeff=0.1, click_coeff=1.0, seed=1, buckets=(0, NUM_BUCKETS))
    draw, taken_s, admitted = np.random.default_rng(1), [], 0
    show_U, click_U = np.ones(STEP_KEYS, np.float32), np.zeros(STEP_KEYS, np.float32)
    for step in range(steps):
        signs_U = np.arange(step * STEP_KEYS, (step + 1) * STEP_KEYS)
        if repeated:
            signs_U = draw.choice(10 * STEP_KEYS, STEP_KEYS, replace=False)
        keys_U = filled.keys_at(signs_U).keys_U
        begin_s = time.perf_counter()
        admitted += int(admission.admit(keys_U, show_U, click_U, step // 10).sum())
        taken_s.append(time.perf_counter() - begin_s)
    return {
        "M_keys_s": STEP_KEYS / float(np.median(taken_s)) / 1e6,
        "M_keys_s_mean": STEP_KEYS / float(np.mean(taken_s[1:] or taken_s)) / 1e6,  # the first one compiles
        "admitted": admitted,
        "mb": admission.num_bytes / 1e6,
    }


def figures(steps: int = STEPS) -> dict[str, dict[str, Any]]:
    """By entries."""
    found = {}
    for name, entries in ENTRIES.items():
        fresh, repeated = (rate(entries, steps, repeated=again) for again in (False, True))
        found[f"admission: {name}"] = {"fresh keys": fresh, "known keys": repeated, "target": ASKED_M_KEYS_S}
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=STEPS)
    print(json.dumps(figures(parser.parse_args().steps)))
