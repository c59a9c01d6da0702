"""What admission, ageing, vectors that join later and small export types buy, and what they cost in AUC.

`python -m tests.bench.living` trains two streams again and again with one seed, the same events and another table each
time, and prints Markdown: rows and memory when the stream has ended, bytes of an export made there, AUC of samples not
yet learnt. Then what is exported after a part of the stream, in each type, is imported by a job that learns nothing and
predicts the day that follows. `--keep` goes on where a run was interrupted. No figure depends on how fast it goes.

*news* is the example with its data. *clicks* is the example on a stream of its own: 5,000 users and 2,500 items at a
time, 5,000 events a day for ten days; an item lives three days, and tastes swing once in six.
"""

import argparse
import gzip
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.config import load_toml, validate
from headrace.dataset.sources.simulated import START_S, SimulatedSource, SimulatedStream
from headrace.dataset.sources.simulated_world import EVENTS_A_DAY
from headrace.dataset.stream.source import Segment
from headrace.deadline import Deadline
from headrace.pserver.server.commands import CountRows
from headrace.service.exports.model_import import ImportRequest, import_into
from headrace.service.spec.job import JobFile, LoadedJob
from headrace.trainer.config import WorkerConfig
from headrace.trainer.train.assembly import open_trainer
from tests.bench.w1 import ROOT

EXAMPLES = ROOT / "deploy" / "examples"
DATA = Path(os.environ.get("HEADRACE_DATA", ROOT.parent / "shared" / "data"))
RESULTS = ROOT / "tests" / "bench" / "results" / "living.json"
DTYPES = ("float32", "float16", "int8")
DAY_EVENTS, DAYS = 5_000, 10
"""Of the clicks."""
ASK_S = 60.0


LEARNT = {"default_row": "learnt"}


def count(n: int) -> dict[str, Any]:
    """A table whose keys are admitted when they were seen so often."""
    return {"admission": [{"kind": "count", "n": n}]}


CASES: dict[str, dict[str, Any]] = {
    "as shipped": {},
    "`count`, n = 2": count(2),
    "n = 2, default row learnt": count(2) | LEARNT,
    "`count`, n = 3": count(3),
    "n = 3, default row learnt": count(3) | LEARNT,
    "`count`, n = 5": count(5),
    "n = 5, default row learnt": count(5) | LEARNT,
    "`probability`, p = 0.5": {"admission": [{"kind": "probability", "p": 0.5}]},
    "p = 0.5, default row learnt": {"admission": [{"kind": "probability", "p": 0.5}]} | LEARNT,
    "`delete_after_days` = 3": {"delete_after_days": 3},
    "`delete_after_days` = 5": {"delete_after_days": 5},
    "`delete_after_days` = 7": {"delete_after_days": 7},
    "`delete_below` = 0.25": {"delete_below": 0.25},
    "`extend_at` = 0.3": {"extend_at": 0.3},
    "n = 2, 5 days": count(2) | {"delete_after_days": 5},
    "n = 2, 5 days, `extend_at` = 1": count(2) | {"delete_after_days": 5, "extend_at": 1.0},
}


@dataclass(frozen=True)
class Stream:
    """An example on a file of events, of which the types' part learns some and predicts the `held_out` next ones."""

    example: str
    events: Path
    learnt: int
    held_out: int

    def cut(self, begin: int, end: int) -> Path:
        """A file of its events from `begin` to `end`."""
        path = self.events.with_name(f"{self.example}-{begin}-{end}.jsonl")
        with self.events.open("rb") as whole, path.open("wb") as part:
            part.writelines(itertools.islice(whole, begin, end))
        return path

    def spec(self, events: Path, **changed: Mapping[str, Any]) -> dict[str, Any]:
        """The example's job on these events; `changed`: more of its sections."""
        raw = load_toml(EXAMPLES / self.example / "job.toml")
        (source,) = raw["sources"]
        raw["sources"] = {source: {"kind": "files", "paths": [str(events)], "event_time": {"field": "ts"}}}
        raw["pipe"]["command"] = [sys.executable, str(EXAMPLES / self.example / "generator.py")]
        raw["tables"]["default"] |= {"max_shrink_fraction": 1.0, **changed.pop("table", {})}
        raw["metrics"]["window"] = "24h"
        return raw | changed


def news(folder: Path) -> Stream:
    """50,080 events of 14 days."""
    events = folder / "news.jsonl"
    with gzip.open(DATA / "ebnerd" / "impressions.jsonl.gz") as packed:
        events.write_bytes(packed.read())
    return Stream("news", events, 25_040, 3_577)


def clicks(folder: Path) -> Stream:
    """DAYS days of DAY_EVENTS events."""
    num_events, events = DAYS * DAY_EVENTS, folder / "clicks.jsonl"
    world = {"users": 5_000, "items": 2_500, "item_life": 15_000, "drift": 20.0, "partitions": 1}
    source = SimulatedStream(SimulatedSource(kind="simulated", events=num_events, **world), 1)
    deadline = Deadline.after(ASK_S)
    (partition,) = source.partitions(deadline)
    with events.open("wb") as file:
        for made in source.read(Segment(partition.name, 0, 0, num_events, partition.identity), deadline):
            for begin, end in zip(made.begin_E.tolist(), made.end_E.tolist(), strict=True):
                file.write(slower(bytes(made.data[begin:end])) + b"\n")
    return Stream("clicks", events, 8 * DAY_EVENTS, DAY_EVENTS)


def slower(event: bytes) -> bytes:
    """An event whose time goes by so much faster that DAY_EVENTS are a day."""
    head, _, rest = event.partition(b",")
    since_s = float(head.removeprefix(b'{"ts":')) - START_S
    return b'{"ts":%.3f,' % (START_S + since_s * EVENTS_A_DAY / DAY_EVENTS) + rest


# -- one run ----------------------------------------------------------------------------------------------------------


def run(raw: Mapping[str, Any], imported: Path | None = None) -> dict[str, Any]:
    """Figures of a job that is run to its end, begun from the export `imported`."""
    with tempfile.TemporaryDirectory() as name:
        folder, raw = Path(name), {**raw, "store": {"path": "store"}}
        store = folder / "store"
        if imported is not None:
            job = LoadedJob(spec=validate(JobFile, raw), raw=raw, folder=folder, store=store)
            with redirect_stdout(sys.stderr):
                import_into(job, ImportRequest(str(imported)))
        store.mkdir(exist_ok=True)
        where = {"folder": folder, "store": store, "live": store / "live", "socket": folder / "role"}
        with open_trainer(WorkerConfig(job=raw, rank=0, world=1, cores=2, **where)) as trainer:
            trainer.loop.run()
            rows = trainer.parts.shards.call(CountRows(), Deadline.after(ASK_S)).tables["default"]
            metrics = trainer.parts.observer.report()
        exports = {path.name: size_of(path) for path in sorted((store / "exports").glob("*"))}
        return {"rows": rows.num_rows, "bytes": rows.num_bytes, "exports": exports, "auc": aucs(metrics)}


def aucs(metrics: Mapping[str, Any]) -> dict[str, float | None]:
    """AUC by what it is over; GAUC, None where nothing is grouped, of the last half."""
    last = metrics["halves"]["last"]["ctr"]
    found = {name: metrics[name]["ctr"]["auc"] for name in ("life", "window")}
    return found | {"last half": last["auc"], "GAUC": last["gauc"]}


def size_of(stream: Path) -> int:
    """Bytes of the rows of a stream's one export."""
    (manifest,) = stream.glob("*/*/*/manifest.json")
    files = json.loads(manifest.read_text())["files"]
    return sum(file["bytes"] for path, file in files.items() if path.startswith("rows-"))


# -- all of them ------------------------------------------------------------------------------------------------------


def of_tables(stream: Stream, known: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Figures of every case that is not known."""
    for name, table in CASES.items():
        if name not in known:
            dtypes = DTYPES if not table else DTYPES[:1]
            raw = stream.spec(stream.events, table=table, exports={dtype: {"dtype": dtype} for dtype in dtypes})
            yield name, run(raw)


def of_types(stream: Stream, folder: Path, known: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """AUC of what is exported in each type, on the day after."""
    if all(f"as {dtype}" in known for dtype in DTYPES):
        return
    out = folder / f"{stream.example}-exports"
    sections = {dtype: {"dtype": dtype, "path": str(out / dtype)} for dtype in DTYPES}
    run(stream.spec(stream.cut(0, stream.learnt), exports=sections))
    predicting = stream.cut(stream.learnt, stream.learnt + stream.held_out)
    for dtype in DTYPES:
        frozen = load_toml(EXAMPLES / stream.example / "job.toml").get("train", {}) | {"learn_until": 0}
        yield f"as {dtype}", run(stream.spec(predicting, train=frozen), out / dtype / stream.example)


def printed(results: Mapping[str, Mapping[str, Any]]) -> None:
    """The tables, as Markdown."""
    for stream, found in results.items():
        shipped = found["as shipped"]
        print(f"\n| *{stream}* | rows | memory | export | AUC, life | last half | last day | GAUC |")
        print("|---|---|---|---|---|---|---|---|")
        for name in CASES:
            if name in found:
                print(line(name, found[name]))
        print("\n| exported as | bytes of rows | AUC of the next day |\n|---|---|---|")
        for dtype in DTYPES:
            if f"as {dtype}" in found:
                auc = found[f"as {dtype}"]["auc"]["life"]
                print(f"| {dtype} | {shipped['exports'][dtype] / 1e6:.1f} MB | {auc:.5f} |")


def line(name: str, figures: Mapping[str, Any]) -> str:
    """A case as a row of the table."""
    auc, export = figures["auc"], figures["exports"]["float32"]
    cells = [f"{figures['rows']:,}", f"{figures['bytes'] / 1e6:.1f} MB", f"{export / 1e6:.1f} MB"]
    cells += ["-" if auc[over] is None else f"{auc[over]:.4f}" for over in ("life", "last half", "window", "GAUC")]
    return f"| {name} | {' | '.join(cells)} |"


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--only", nargs="*", choices=("news", "clicks"), default=("news", "clicks"))
    arguments.add_argument("--keep", action="store_true", help="figures that are there are not made again")
    given = arguments.parse_args()
    results = json.loads(RESULTS.read_text()) if given.keep and RESULTS.exists() else {}
    with tempfile.TemporaryDirectory() as name:
        for chosen in given.only:
            stream = {"news": news, "clicks": clicks}[chosen](Path(name))
            known = results.setdefault(chosen, {})
            for part in (of_tables(stream, known), of_types(stream, Path(name), known)):
                for case, figures in part:
                    known[case] = figures
                    print(chosen, case, json.dumps(figures), file=sys.stderr)
                    RESULTS.parent.mkdir(exist_ok=True)
                    RESULTS.write_text(json.dumps(results, indent=2))
    printed(results)


if __name__ == "__main__":
    main()
