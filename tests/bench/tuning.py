"""The worth and the cost of `train.tune`: `python -m tests.bench.tuning clicks news ...`, for streams of tests.bench.

A job with all defaults tries settings on the first events of its stream, as a new job does; then the whole stream is
learnt by the job as it is, and by the job under its choice. AUC is that of the second half, each sample predicted
before it is learnt. Seconds are of cores: those of trials, and of a run on 500,000 events at the speed of the job as it
is.

`--sweep 40` also learns the whole stream by so many settings, drawn over wide ranges, and prints the best one by that
AUC. `--samples 500000` makes simulated streams longer.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import headrace.trainer.train.tuning as trials
from headrace.config import set_key, validate
from headrace.dataset.spec.schema import Schema
from headrace.service.cluster.tuning import Tuning
from headrace.service.spec.job import job_of
from headrace.trainer.config import TrainerJob
from headrace.trainer.spec.defaults import rows_learn
from tests.bench.model_figures import Changes, merge, trained
from tests.bench.streams import STREAMS, WORLD_SAMPLES, Streams

LONG = 500_000
"""Events of the run that tuning is compared with."""
NEAR = 0.002
"""AUC by which a setting may be below the best one."""


class Measured:
    """Streams that are read once, and what tuning does on them."""

    def __init__(self, folder: Path, events: int, settings: int) -> None:
        self._folder, self._events, self._settings, self._streams = folder, events, settings, Streams(folder)

    def on(self, stream: str) -> dict[str, Any]:
        """The figures of a stream."""
        raw = self._raw(stream)
        raw["tuning"] = {"events": self._events, "settings": self._settings}
        samples = self._streams.samples(stream)
        self._trained(raw, stream)  # compiles
        num_events = int(samples.event_B[-1]) + 1
        begin_s = time.process_time()
        tried = self._tried(raw)
        tuning_s = time.process_time() - begin_s
        before = self._trained(raw, stream)
        keys = tried[0].keys
        for path, value in keys.items():
            set_key(raw, path, value)
        after = self._trained(raw, stream) if keys else before
        run_s = before["core_s"] / num_events * LONG
        return {
            "stream": stream,
            "chosen": dict(keys),
            "name": tried[0].name,
            "auc": before["auc"],
            "gain": after["auc"] - before["auc"],
            "loss": after["logloss"] - before["logloss"],
            "tuning_s": tuning_s,
            "run_s": run_s,
            "share": tuning_s / run_s,
            "slower": after["core_s"] / before["core_s"],
            "tried": [(each.name, each.events, each.measured(len(each.losses))[0]) for each in tried],
        }

    def swept(self, stream: str, number: int) -> dict[str, Any]:
        """The best of so many settings by the AUC of the whole stream, and how many are within 0.002 of it."""
        raw = self._raw(stream)
        num_slots = len(Schema.of(validate(TrainerJob, raw).slots).sparse)
        aucs = []
        for changes in drawn(number, num_slots):
            changed = json.loads(json.dumps(raw))
            merge(changed, changes)
            aucs.append((self._trained(changed, stream)["auc"], changes))
        best, changes = max(aucs, key=lambda each: each[0])
        return {"stream": stream, "best": best, "changes": changes, "near": sum(auc > best - NEAR for auc, _ in aucs)}

    def _raw(self, stream: str) -> dict[str, Any]:
        raw = json.loads(json.dumps(self._streams.spec(stream)))
        raw.setdefault("train", {}).update({"threads": 1, "device": "cpu"})
        return dict(raw)

    def _tried(self, raw: dict[str, Any]) -> list[trials.Trial]:
        with tempfile.TemporaryDirectory(dir=self._folder) as name:
            folder = Path(name)
            tuning = Tuning.of(job_of(raw, self._folder))
            config = tuning.config(folder)
            config["trainer"]["cores"] = 1
            return trials.try_settings(trials.TrialsConfig.model_validate(config))

    def _trained(self, raw: dict[str, Any], stream: str) -> dict[str, Any]:
        return trained(self._streams.config(raw), self._streams.reader(stream))


def drawn(number: int, num_slots: int) -> list[Changes]:
    """Settings with rates of a sixth to six times the defaults, the job as it is first; the same each time."""
    random, found = np.random.default_rng(1), list[Changes]([{}])
    while len(found) < number:
        vectors, first_order, dense = (float(f"{each:.2g}") for each in 6.0 ** random.uniform(-1, 1, 3))
        rows = rows_learn(num_slots)
        rows["optimizer"]["lr"] *= vectors
        rows["first_order_optimizer"]["lr"] *= first_order
        table = rows | {"dim": int(random.choice([8, 16, 32]))}
        optimizer = {"kind": "adam", "lr": 0.003 * dense}
        batch = int(random.choice([64, 128, 256, 512]))
        found.append({"tables": {"default": table}, "dense": {"optimizer": optimizer}, "train": {"batch_size": batch}})
    return found


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("streams", nargs="+", choices=STREAMS)
    arguments.add_argument("--events", type=int, default=10_000)
    arguments.add_argument("--settings", type=int, default=8)
    arguments.add_argument("--samples", type=int, help="of a simulated stream, in place of 60,000")
    arguments.add_argument("--sweep", type=int, default=0, metavar="NUMBER", help="settings over the whole stream")
    given = arguments.parse_args()
    if given.samples is not None:
        WORLD_SAMPLES.update(dict.fromkeys(WORLD_SAMPLES, given.samples))
    with tempfile.TemporaryDirectory() as folder:
        measured = Measured(Path(folder), given.events, given.settings)
        for stream in given.streams:
            print(json.dumps(measured.on(stream)), flush=True)
            if given.sweep:
                print(json.dumps(measured.swept(stream, given.sweep)), flush=True)


if __name__ == "__main__":
    main()
