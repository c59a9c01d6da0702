"""All models with their defaults on the streams of the examples, beside learners that take a sample at a time.

`python -m tests.bench.zoo` fills its tables of docs/model-figures.md: AUC and log loss of the second half, each sample
predicted before it is learnt; samples a second of one core, without reading; rows and their memory. A stream is read
once, and all learn the same samples. Figures that are there are not made again, but with `--again`; `--only news` takes
streams, `--models lr deepfm` takes lines, `--print` writes no page. A stream without its data, and a learner whose
package is not installed (`pip install 'headrace[bench]'`), is left out, and said to be.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headrace.dataset.samples.batch import Samples
from headrace.service.monitor.lines import crosses_text
from headrace.service.planning.cross_choice import choice_of
from headrace.service.spec.chosen_crosses import chooses, under_crosses
from headrace.service.spec.job import job_of
from headrace.trainer.job_status import read
from headrace.trainer.metrics.halves import StreamHalves
from headrace.trainer.metrics.samples import row_type
from headrace.trainer.tuning_status import ChosenCrossesStatus
from tests.bench.linear import FieldAware, Flat, Learnt, Linear
from tests.bench.model_figures import PAGE, Changes, merge, trained, write_between
from tests.bench.peers import PEERS, is_installed
from tests.bench.streams import STREAMS, Streams, is_here
from tests.bench.w1 import ROOT

RESULTS = ROOT / "tests" / "bench" / "results" / "zoo.json"
BEGIN, END = "<!-- zoo: begin -->\n", "<!-- zoo: end -->\n"
EXAMPLES = ("criteo", "news", "clicks")
LABEL = "click"
FOR_PAIRS = "fm deepfm wide_deep deep_crossing dcn dcn_v2 dlrm finalmlp mmoe".split()
ITEMS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "news": ("article", tuple(f"article_{each}" for each in "page hour weekday device subscriber gender age".split())),
    "clicks": ("item", ("topic",)),
}
"""Of a stream whose users and items have names: the item, and other slots of it."""
LEARNERS: Mapping[str, Any] = {
    "logistic regression": Linear(),
    "logistic regression, all crosses": Linear(crosses=True),
    "FTRL-proximal": Linear(l1=1.0, l2=1.0),
    "FTRL-proximal, all crosses": Linear(crosses=True, l1=1.0, l2=1.0),
    "field-aware FM": FieldAware(),
    **PEERS,
}
"""Each takes a sample at a time."""


def models_of(stream: str) -> dict[str, Changes]:
    """What each line changes of the stream's job: the model, and slots that are added for it."""
    found: dict[str, Changes] = {"lr": {"model": {"name": "lr"}}}
    found |= {name: {"model": {"name": name}} for name in FOR_PAIRS}
    if stream not in ITEMS:
        return found
    item, others = ITEMS[stream]
    history = {"key": "user", "of": item, "last": 50, "when": LABEL}
    pooled, sequence = {"name": "seen", "history": history}, {"name": "seen", "pooling": "none", "history": history}
    attending = {name: {"name": name, "settings": {"target": item}} for name in ("din", "sasrec")}
    found["two_tower"] = {"model": {"name": "two_tower", "settings": {"item": [item, *others]}}}
    found["deepfm, with the clicks of the user"] = {"model": {"name": "deepfm"}, "slots": [pooled]}
    found |= {f"{name}, likewise": {"model": section, "slots": [sequence]} for name, section in attending.items()}
    return found


Measure = Callable[[], Any]
Results = dict[str, dict[str, Any]]
"""Figures by stream and line."""


class Zoo:
    """Streams and what each line of their tables is measured by."""

    def __init__(self, folder: Path) -> None:
        self.streams, self._folder = Streams(folder), folder

    def model(self, stream: str, changes: Changes, *, crosses: bool = False) -> dict[str, Any]:
        """Figures of a job with all defaults but for the changes; slots are added. `crosses`: whether it chooses
        crosses first, as a new job does."""
        raw = json.loads(json.dumps(self.streams.spec(stream)))
        slots = raw["slots"] + changes.get("slots", [])
        merge(raw, {"train": {"threads": 1, "device": "cpu"}})
        merge(raw, {**changes, "slots": slots})
        reader, job = self.streams.reader(stream), job_of(raw, self._folder)
        if crosses and chooses(job):
            choice = choice_of(job, reader.samples).model_dump(mode="json")
            raw = under_crosses(job, choice).raw
            print(stream, crosses_text(read(ChosenCrossesStatus, choice)), file=sys.stderr)
        return trained(self.streams.config(raw), reader)

    def learner(self, stream: str, learner: Any, samples: Samples | None = None) -> dict[str, Any]:
        """Figures of a learner of one sample at a time, measured as those of a job are; on other samples if given."""
        samples = samples or self.streams.samples(stream)
        flat = Flat.of(samples, LABEL)
        begin_s = time.process_time()
        found: Learnt = learner.learn(flat)
        core_s = time.process_time() - begin_s
        group_B = samples.meta.get("impression")
        half = last_half(found.prediction_B, flat.label_B, group_B, Path(tempfile.mkdtemp(dir=self._folder)))
        measured = {"samples": len(flat.label_B), "rows": found.rows, "bytes": found.num_bytes, "core_s": core_s}
        return {name: half[name] for name in ("auc", "gauc", "logloss")} | measured


def last_half(prediction_B: np.ndarray, label_B: np.ndarray, group_B: np.ndarray | None, folder: Path) -> Any:
    """The measures of the second half of a stream."""
    halves = StreamHalves(folder, [("ctr", True)], group_B is not None)
    rows_B = np.zeros(len(label_B), row_type(1, group_B is not None))
    rows_B["prediction0"], rows_B["label0"], rows_B["weight0"] = prediction_B, label_B, 1.0
    if group_B is not None:
        rows_B["group"] = np.unique(group_B, return_inverse=True)[1]
    halves.append(rows_B)
    found = halves.measures()
    assert found is not None
    return found["last"]["ctr"]


def lines_of(stream: str, zoo: Zoo) -> Iterator[tuple[str, Measure]]:
    """The name of each line of a stream's table, and what measures it."""
    for name, changes in models_of(stream).items():
        yield name, lambda changes=changes: zoo.model(stream, changes)
    for name, learner in LEARNERS.items():
        if name in PEERS and not is_installed(PEERS[name]):
            print(f"{name}: left out, {PEERS[name].module} is not installed", file=sys.stderr)
            continue
        learner.learn(WARM_UP)  # compiles
        yield name, lambda learner=learner: zoo.learner(stream, learner)


WARM_UP = Flat(
    *(np.ones(1, np.uint64), np.ones(1), np.zeros(1, np.int64), np.array([0, 1]), np.array([0, 1]), np.ones(1), 1)
)


# -- the page ---------------------------------------------------------------------------------------------------------


def line(name: str, found: Mapping[str, Any]) -> str:
    """A row of a table."""
    gauc = "-" if found["gauc"] is None else f"{found['gauc']:.3f}"
    rows = "-" if found["rows"] is None else f"{found['rows']:,}"
    memory = "-" if found["bytes"] is None else f"{found['bytes'] / 1e6:.1f} MB"
    cells = [f"{found['auc']:.4f}", f"{found['logloss']:.4f}", gauc, f"{found['samples'] / found['core_s']:,.0f}"]
    return f"| {name} | {' | '.join([*cells, rows, memory])} |"


def tables_of(results: Mapping[str, Mapping[str, Any]]) -> str:
    """All tables as Markdown, and how they were made."""
    lines = []
    for stream in (stream for stream in STREAMS if results.get(stream)):
        known = results[stream]
        size = next(iter(known.values()))["samples"]
        lines += [f"| *{stream}*, {size:,} samples | AUC | log loss | GAUC | samples/s a core | rows | memory |"]
        lines += ["|---|---|---|---|---|---|---|"]
        names = [*models_of(stream), *LEARNERS]
        lines += [line(name, known[name]) for name in names if name in known] + [""]
    return "\n".join(["", *lines, ""])


def measured(
    path: Path,
    streams: Sequence[str],
    lines_of: Callable[[str, Zoo], Iterator[tuple[str, Measure]]],
    told: Callable[[str, Mapping[str, Any]], str],
    *,
    again: bool,
) -> Results:
    """The figures in `path`, with those of the lines of `streams` that lack there, or of all with `again`."""
    results: Results = json.loads(path.read_text()) if path.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        zoo = Zoo(Path(folder))
        for stream in streams:
            if not is_here(stream):
                print(f"{stream}: left out, its data are not here; see HEADRACE_DATA", file=sys.stderr)
                continue
            known = results.setdefault(stream, {})
            for name, measure in lines_of(stream, zoo):
                if name in known and not again:
                    continue
                known[name] = measure()
                print(stream, told(name, known[name]), file=sys.stderr, flush=True)
                path.parent.mkdir(exist_ok=True)
                path.write_text(json.dumps(results, indent=1))
    return results


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--only", nargs="*", choices=STREAMS, default=EXAMPLES)
    arguments.add_argument("--models", nargs="*", help="lines, by the begin of their names")
    arguments.add_argument("--again", action="store_true", help="also what has figures")
    arguments.add_argument("--print", dest="prints", action="store_true", help="do not write the page")
    given = arguments.parse_args()

    def chosen(stream: str, zoo: Zoo) -> Iterator[tuple[str, Measure]]:
        for name, measure in lines_of(stream, zoo):
            if given.models is None or name.startswith(tuple(given.models)):
                yield name, measure

    results = measured(RESULTS, given.only, chosen, line, again=given.again)
    if not given.prints:
        write_between(PAGE, BEGIN, END, lambda _: tables_of(results))
    print(tables_of({stream: results.get(stream, {}) for stream in given.only}))


if __name__ == "__main__":
    main()
