"""What models learn from the streams of the examples, and what admission and ageing cost: docs/model-figures.md.

`python -m tests.bench.model_figures` runs each case of CASES that has no figures yet, one after another, each in a
process of its own on one core, and writes the tables between the marks of the page. A case without figures here, as in
a new clone, keeps its line. `--only criteo` takes cases whose name contains that text, `--repeat 3` runs them until
each has so many figures (a speed is then their median), `--write` measures nothing. AUC, rows and bytes are the same in
every run; speeds are not, where other work runs beside it.
"""

import argparse
import json
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from headrace.config import load_toml
from headrace.dataset.loader.batch_loader import PassReader
from headrace.deadline import Deadline
from headrace.pserver.server.commands import CountRows
from headrace.trainer.config import WorkerConfig
from headrace.trainer.train.assembly import open_trainer
from tests.bench.streams import DATA, EXAMPLES, FILES
from tests.bench.w1 import ROOT

RESULTS = ROOT / "tests" / "bench" / "results" / "model_figures.json"
PAGE = ROOT / "docs" / "model-figures.md"
BEGIN, END = "<!-- measured: begin -->\n", "<!-- measured: end -->\n"
CLICKS_EVENTS = 60_000
ASK_S = 60.0

Changes = Mapping[str, Any]


@dataclass(frozen=True)
class Case:
    """One run: a job file of an example, and what differs from it."""

    part: str
    """Heading of the table."""
    name: str
    """Of its line."""
    job: str
    changes: Changes = field(default_factory=dict)
    """Sections are merged; None removes a key."""
    slots: Mapping[str, Changes] = field(default_factory=dict)
    """Changes of slots, by name; those that the job has not are added."""

    @property
    def key(self) -> str:
        """Its name among the results."""
        return f"{self.part}: {self.name}"

    @property
    def example(self) -> str:
        """The folder of the example."""
        return self.job.split("/")[0]

    def spec(self) -> dict[str, Any]:
        """The job."""
        raw = load_toml(EXAMPLES / self.job)
        (source,) = raw["sources"].values()
        if self.example in FILES:
            source["paths"] = [str(DATA / FILES[self.example][0])]
        else:
            source |= {"events": CLICKS_EVENTS, "rate": 0.0, "partitions": 1}
        raw["pipe"]["command"] = [sys.executable, str(EXAMPLES / self.example / "generator.py")]
        own = {slot.get("name"): slot for slot in raw["slots"]}
        for name, changes in self.slots.items():
            if name not in own:
                raw["slots"].append(own.setdefault(name, {"name": name}))
            merge(own[name], changes)
        merge(raw, {**self.changes, "store": {"path": "store"}})
        merge(raw, {"train": {"threads": 1, "device": "cpu"}})
        return raw


def merge(raw: dict[str, Any], changes: Changes) -> None:
    """Change a section, and the sections in it. A section that names another kind or model is replaced."""
    for key, value in changes.items():
        if value is None:
            raw.pop(key, None)
        elif isinstance(value, Mapping) and isinstance(raw.get(key), dict) and not {"kind", "name"} & set(value):
            merge(raw[key], value)
        else:
            raw[key] = value


def model(name: str, **settings: object) -> Changes:
    """A job with another model."""
    return {"model": {"name": name, "settings": settings}}


def sasrec(target: str, *hidden: int, **settings: object) -> Changes:
    """A job with the model that reads the history in its order."""
    return model("sasrec", hidden=list(hidden), target=target, **settings)


def table(**changes: object) -> Changes:
    """A job with another table."""
    return {"tables": {"default": changes}}


def adagrad(rate: float) -> Changes:
    """The optimizer of rows, with this learning rate."""
    return {"kind": "adagrad", "lr": rate}


def lr(rate: float) -> Changes:
    """Logistic regression: rows of one weight."""
    return {**model("lr"), **table(dim=0, optimizer=adagrad(rate))}


CROSSES = [f"article_{each}" for each in "page hour weekday device subscriber gender postcode age".split()]
ITEM = ["article", *CROSSES]
SEQUENCE = {"clicked": {"share": None, "pooling": "none"}}
OWN = {"clicked": {"history": {"key": "user", "of": "item", "last": 50, "when": "click"}, "pooling": "mean"}}
OWN_SEQUENCE = {"clicked": {**OWN["clicked"], "pooling": "none"}}
NEWS, LONG, CRITEO, CLICKS = "news/job.toml", "news/histories.toml", "criteo/job.toml", "clicks/job.toml"
LIFE = {
    "as shipped": {},
    **{f"`count`, n = {n}": {"admission": [{"kind": "count", "n": n}]} for n in (1, 2, 5, 10)},
    "n = 2, default row learnt": {"admission": [{"kind": "count", "n": 2}], "default_row": "learnt"},
    "n = 5, default row learnt": {"admission": [{"kind": "count", "n": 5}], "default_row": "learnt"},
    "`probability`, p = 0.5": {"admission": [{"kind": "probability", "p": 0.5}]},
}
AGEING = {
    **{f"`delete_after_days` = {days}": {"delete_after_days": days} for days in (1, 3, 7)},
    "`delete_below` = 0.25, `decay` = 0.98": {"delete_below": 0.25},
    "`delete_below` = 0.25, `decay` = 0.8": {"delete_below": 0.25, "decay": 0.8},
    "n = 2, 3 days": {"admission": [{"kind": "count", "n": 2}], "delete_after_days": 3},
}
SMALL = table(optimizer=adagrad(0.05), first_order_optimizer=adagrad(0.02))
DCN = model("dcn_v2", hidden=[128, 64])
TOWERS = model("two_tower", hidden=[32, 16], item=["item", "topic"])
MODELS = [
    Case("news, fields and crosses", "lr", NEWS, lr(0.1)),
    Case("news, fields and crosses", "deepfm", NEWS),
    Case("news, fields and crosses", "dcn_v2", NEWS, model("dcn_v2", hidden=[64, 32])),
    Case("news, fields and crosses", "two_tower", NEWS, model("two_tower", hidden=[64, 32], item=ITEM)),
    Case("news, with histories", "lr", LONG, lr(0.1)),
    Case("news, with histories", "deepfm", LONG),
    Case("news, with histories", "dcn_v2", LONG, model("dcn_v2", hidden=[64, 32])),
    Case("news, with histories", "din", LONG, model("din", hidden=[64, 32], target="article"), SEQUENCE),
    Case("news, with histories", "sasrec", LONG, sasrec("article", 64, 32), SEQUENCE),
    Case("news, with histories", "sasrec, HSTU blocks", LONG, sasrec("article", 64, 32, block="hstu"), SEQUENCE),
    Case(
        "news, with histories",
        "two_tower",
        LONG,
        model("two_tower", hidden=[64, 32], item=[*ITEM, "readers", "hours"]),
    ),  # fmt: skip
    Case("criteo", "lr", CRITEO, lr(0.05)),
    Case("criteo", "deepfm", CRITEO),
    Case("criteo", "dcn_v2", CRITEO, model("dcn_v2", hidden=[128, 64])),
    Case("criteo", "dcn_v2, settings below", CRITEO, DCN | SMALL | {"train": {"batch_size": 64}}),
    Case("criteo", "finalmlp", CRITEO, model("finalmlp", hidden=[128, 64])),
    Case("clicks, with a history", "lr", CLICKS, lr(0.1), OWN),
    Case("clicks, with a history", "deepfm", CLICKS, {}, OWN),
    Case("clicks, with a history", "dcn_v2", CLICKS, model("dcn_v2", hidden=[32, 16]), OWN),
    Case("clicks, with a history", "din", CLICKS, model("din", hidden=[32, 16], target="item"), OWN_SEQUENCE),
    Case("clicks, with a history", "sasrec", CLICKS, sasrec("item", 32, 16), OWN_SEQUENCE),
    Case("clicks, with a history", "sasrec, HSTU blocks", CLICKS, sasrec("item", 32, 16, block="hstu"), OWN_SEQUENCE),
    Case("clicks, with a history", "two_tower", CLICKS, TOWERS, OWN),
]
TUNED = [
    Case("criteo, dcn_v2", "first-order lr 0.02 (not 0.05)", CRITEO, DCN | table(first_order_optimizer=adagrad(0.02))),
    Case(
        "criteo, dcn_v2", "no first-order weights", CRITEO, DCN | table(first_order=False, first_order_optimizer=None)
    ),
    Case("criteo, dcn_v2", "lr of vectors 0.05 (not 0.02)", CRITEO, DCN | table(optimizer=adagrad(0.05))),
    Case("criteo, dcn_v2", "both lrs", CRITEO, DCN | SMALL),
    Case("criteo, dcn_v2", "both lrs, batches of 128 (not 256)", CRITEO, DCN | SMALL | {"train": {"batch_size": 128}}),
    Case("criteo, dcn_v2", "both lrs, batches of 64", CRITEO, DCN | SMALL | {"train": {"batch_size": 64}}),
    Case("criteo, dcn_v2", "vectors of 16 (not 8)", CRITEO, DCN | table(dim=16)),
    Case("criteo, dcn_v2", "vectors of 4", CRITEO, DCN | table(dim=4)),
    Case("criteo, dcn_v2", "dropout 0.1 (not 0)", CRITEO, model("dcn_v2", hidden=[128, 64], dropout=0.1)),
    Case("criteo, dcn_v2", "three cross layers (not 2)", CRITEO, model("dcn_v2", hidden=[128, 64], cross_layers=3)),
]
FIELDS = "user page last_click device sso subscriber gender postcode age hour weekday list_length".split()
CATEGORIES = [f"C{number}" for number in range(1, 27)]
PLAIN, COUNTED = "news/plain.toml", "news/counters.toml"


def knows(*of: str) -> Mapping[str, Changes]:
    """A slot with the statistics of the rows of these slots."""
    return {"known": {"kind": "dense", "statistics": {"of": list(of)}}}


def counts(**windows: object) -> Mapping[str, Changes]:
    """A slot with counters of the article."""
    return {"counts": {"kind": "dense", "counters": {"key": "article", "click": "click", **windows}}}


KNOWING = [
    Case("news, counters of the article", "windows 1h, 1d and all", NEWS, {}, counts(windows=["1h", "1d", "all"])),
    Case(
        "news, counters of the article",
        "windows 10m, 1h, 6h and all",
        NEWS,
        {},
        counts(windows=["10m", "1h", "6h", "all"]),
    ),
    Case("news, counters of the article", "half-lives 1h and 1d", NEWS, {}, counts(half_lives=["1h", "1d"])),
    Case(
        "news, counters of the article",
        "half-lives 10m, 1h, 6h and 1d",
        NEWS,
        {},
        counts(half_lives=["10m", "1h", "6h", "1d"]),
    ),
    Case("news, statistics of rows", "deepfm", NEWS),
    Case("news, statistics of rows", "of the article", NEWS, {}, knows("article")),
    Case("news, statistics of rows", "and the reader", NEWS, {}, knows("article", "user")),
    Case("news, statistics of rows", "and the crosses of the article", NEWS, {}, knows("user", *ITEM)),
    Case("news, statistics of rows", "of all fields and crosses", NEWS, {}, knows(*FIELDS, *ITEM)),
    Case("news, statistics of rows", "plain fields, lr: of all", PLAIN, {}, knows(*FIELDS, "article")),
    Case(
        "news, statistics of rows",
        "histories and counters, of the reader and the article with crosses",
        COUNTED,
        {},
        knows("user", *ITEM),
    ),
    Case("criteo, statistics of rows", "deepfm", CRITEO),
    Case("criteo, statistics of rows", "of all 26 categories", CRITEO, {}, knows(*CATEGORIES)),
    Case("criteo, statistics of rows", "lr", CRITEO, lr(0.05)),
    Case("criteo, statistics of rows", "lr, of all 26 categories", CRITEO, lr(0.05), knows(*CATEGORIES)),
]
LIVES = [
    *(Case("news, rows", name, NEWS, table(max_shrink_fraction=1.0, **life)) for name, life in (LIFE | AGEING).items()),
    *(Case("criteo, rows", name, CRITEO, table(**life)) for name, life in LIFE.items()),
]
CASES = [*MODELS, *TUNED, *LIVES, *KNOWING]


# -- one run ----------------------------------------------------------------------------------------------------------


def run(case: Case) -> dict[str, Any]:
    """Figures of a job that is run to its end, in this process."""
    with tempfile.TemporaryDirectory() as name:
        folder, store = Path(name), Path(name) / "store"
        store.mkdir()
        where = {"folder": folder, "store": store, "live": store / "live", "socket": folder / "role"}
        return trained(WorkerConfig(job=case.spec(), rank=0, world=1, cores=1, **where))


def trained(config: WorkerConfig, reader: PassReader | None = None) -> dict[str, Any]:
    """Figures of a job that is run to its end; `reader` replaces its source and pipe."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with open_trainer(config, reader) as trainer:
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        trainer.loop.run()
        cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - wall_s
        trainer.rank0.beginning.joblog.close()
        rows = trainer.parts.shards.call(CountRows(), Deadline.after(ASK_S)).tables.values()
        metrics = trainer.parts.observer.report()
        samples = trainer.parts.progress.num_samples
    pipe = resource.getrusage(resource.RUSAGE_CHILDREN)
    half = metrics["halves"]["last"]["ctr"]
    return {
        **{name: half[name] for name in ("auc", "gauc", "logloss")},
        "samples": samples,
        "rows": sum(each.num_rows for each in rows),
        "bytes": sum(each.num_bytes for each in rows),
        "core_s": cpu_s + pipe.ru_utime - before.ru_utime + pipe.ru_stime - before.ru_stime,
        "wall_s": wall_s,
    }


def measure(cases: Sequence[Case], repeat: int) -> None:
    """Run those that lack figures."""
    for turn in range(1, repeat + 1):
        for case in cases:
            results = known()
            if len(results.get(case.key, [])) >= turn:
                continue
            with ProcessPoolExecutor(1, get_context("spawn")) as alone:
                found = alone.submit(run, case).result()
            print(case.key, json.dumps(found), file=sys.stderr, flush=True)
            results = known()
            results.setdefault(case.key, []).append(found)
            RESULTS.parent.mkdir(exist_ok=True)
            RESULTS.write_text(json.dumps(results, indent=1))


def known() -> dict[str, list[dict[str, Any]]]:
    """The figures of each case, run by run."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


# -- the page ---------------------------------------------------------------------------------------------------------


def line(name: str, found: Sequence[Mapping[str, Any]]) -> str:
    """A case as a row of its table."""
    one = found[0]
    speed = statistics.median(each["samples"] / each["core_s"] for each in found)
    gauc = "-" if one["gauc"] is None else f"{one['gauc']:.3f}"
    cells = [f"{one['auc']:.4f}", gauc, f"{speed:,.0f}", f"{one['rows']:,}", f"{one['bytes'] / 1e6:.1f} MB"]
    return f"| {name} | {' | '.join(cells)} |"


def published(measured: str) -> dict[str, str]:
    """The lines of tables as the page has them, by the case's key."""
    found, part = {}, ""
    for text in measured.splitlines():
        name = text.removeprefix("|").split(" | ")[0].strip()
        if name.startswith("*"):
            part = name.strip("*")
        elif text.startswith("| "):
            found[f"{part}: {name}"] = text
    return found


def tables_of(results: Mapping[str, Sequence[Mapping[str, Any]]], before: str = "") -> str:
    """All tables as Markdown. A case without results keeps its line of `before`, the tables on the page."""
    kept, lines = published(before), []
    found = kept | {each.key: line(each.name, results[each.key]) for each in CASES if each.key in results}
    for part in dict.fromkeys(case.part for case in CASES):
        own = [found[each.key] for each in CASES if each.part == part and each.key in found]
        head = [f"| *{part}* | AUC | GAUC | samples/s a core | rows | memory |", "|---|---|---|---|---|---|"]
        lines += ["", *head, *own] if own else []
    return "\n".join([*lines, "", ""])


def write_between(page: Path, begin: str, end: str, tables: Callable[[str], str]) -> None:
    """Replace what the page has between two marks by the tables that are made of it."""
    above, rest = page.read_text().split(begin)
    measured, below = rest.split(end)
    page.write_text(above + begin + tables(measured) + end + below)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--only", default="", help="cases whose name contains this text")
    arguments.add_argument("--repeat", type=int, default=1)
    arguments.add_argument("--write", action="store_true", help="measure nothing")
    given = arguments.parse_args()
    if not given.write:
        measure([case for case in CASES if given.only in case.key], given.repeat)
    write_between(PAGE, BEGIN, END, lambda measured: tables_of(known(), measured))


if __name__ == "__main__":
    main()
