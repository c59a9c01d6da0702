"""The worth and the cost of `train.tune`: `python -m tests.bench.tuning clicks news ...`, for streams of tests.bench.

A job with all defaults tries settings on the first events of its stream, as a new job does; then the whole stream is
learnt by the job as it is, and by the job under its choice. AUC is that of the second half, each sample predicted
before it is learnt. Seconds are of cores: those of trials, and of a run on 500,000 events at the speed of the job as it
is.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import headrace.trainer.train.tuning as trials
from headrace.config import set_key
from headrace.service.cluster.tuning import Tuning
from headrace.service.spec.job import job_of
from tests.bench.model_figures import trained
from tests.bench.streams import STREAMS, Streams

LONG = 500_000
"""Events of the run that tuning is compared with."""


class Measured:
    """Streams that are read once, and what tuning does on them."""

    def __init__(self, folder: Path, events: int, settings: int) -> None:
        self._folder, self._events, self._settings, self._streams = folder, events, settings, Streams(folder)

    def on(self, stream: str) -> dict[str, Any]:
        """The figures of a stream."""
        raw = json.loads(json.dumps(self._streams.spec(stream)))
        raw.setdefault("train", {}).update({"threads": 1, "device": "cpu"})
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

    def _tried(self, raw: dict[str, Any]) -> list[trials.Trial]:
        with tempfile.TemporaryDirectory(dir=self._folder) as name:
            folder = Path(name)
            tuning = Tuning.of(job_of(raw, self._folder))
            config = tuning.config(folder)
            config["trainer"]["cores"] = 1
            return trials.try_settings(trials.TrialsConfig.model_validate(config))

    def _trained(self, raw: dict[str, Any], stream: str) -> dict[str, Any]:
        return trained(self._streams.config(raw), self._streams.reader(stream))


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("streams", nargs="+", choices=STREAMS)
    arguments.add_argument("--events", type=int, default=20_000)
    arguments.add_argument("--settings", type=int, default=8)
    given = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measured = Measured(Path(folder), given.events, given.settings)
        for stream in given.streams:
            print(json.dumps(measured.on(stream)), flush=True)


if __name__ == "__main__":
    main()
