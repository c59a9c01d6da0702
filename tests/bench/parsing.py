"""What stands before training, alone: the MultiSlot parser, a generator in each example; and whole jobs from a dict."""

import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import numpy as np

from dataset.formats.multislot_parser import MultiSlotParser
from dataset.spec.schema import Schema
from millrace.config import validate
from tests.bench.w1 import ROOT, job, make
from trainer.config import TrainerJob, WorkerConfig

EXAMPLES = ROOT / "deploy" / "examples"


def run_job(spec: dict, folder: Path) -> dict:
    """Run one trainer with an embedded shard on `spec`; its report."""
    config = WorkerConfig(job=spec, folder=folder, store=folder, rank=0, world=1, address_file=folder / "role", cores=2)
    path = folder / "worker.json"
    path.write_text(config.model_dump_json())
    subprocess.run([sys.executable, "-m", "trainer", "--config", str(path)], check=True, capture_output=True, cwd=ROOT)
    return json.loads((folder / "report.json").read_text())


def figures(cache: Path) -> dict[str, dict]:
    """Lines a second through the parser; samples a second through the generators."""
    return {"MultiSlot parser, one core": parser(cache), "generators, one core": generators()}


def parser(cache: Path) -> dict[str, float]:
    """W1 text, 320 bytes a line."""
    folder = cache / "w1-text"
    make(folder, 200_000, text_parts=8)
    data = (folder / "part-000.txt").read_bytes()
    schema = Schema.of(validate(TrainerJob, job(64, folder, 1)).slots)
    MultiSlotParser(schema).parse(data)
    begin = time.perf_counter()
    MultiSlotParser(schema).parse(data)
    elapsed_s = time.perf_counter() - begin
    return {"lines_per_s": data.count(b"\n") / elapsed_s, "mb_per_s": len(data) / 1e6 / elapsed_s}


def generators() -> dict[str, float]:
    """Samples a second of each example's `generate_columns`, on made-up events."""
    rng = np.random.default_rng(1)
    shown = rng.integers(0, 5000, (2000, 12)).tolist()
    fields = ("user_id", "context_article", "last_click", "device_type", "is_sso", "is_subscriber", "gender")
    fields += ("postcode", "age", "hour_of_day", "day_of_week", "n_inview", "impression")
    news = [json.dumps(dict.fromkeys(fields, 3) | {"shown": s, "clicked": s[:1], "ts": 1}).encode() for s in shown]
    criteo = [("1\t" + "\t".join(["7"] * 13) + "\t" + "\t".join(["0a1b2c3d"] * 26)).encode()] * 5000
    return {
        "news_samples_per_s": _rate("news", "Impressions", news),
        "criteo_samples_per_s": _rate("criteo", "Clicks", criteo),
    }


def _rate(example: str, name: str, events: list[bytes]) -> float:
    generator = getattr(_module(EXAMPLES / example / "generator.py"), name)()
    begin, count = time.perf_counter(), 0
    for first in range(0, len(events), 1024):
        count += len(generator.generate_columns(events[first : first + 1024])["event"])
    return count / (time.perf_counter() - begin)


def _module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{path.parent.name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
