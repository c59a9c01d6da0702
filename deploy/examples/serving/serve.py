"""Serve exports without Headrace: python serve.py [--events FILE] FOLDER, the folder with current.json; or give a base
and the deltas after it.

Without events it predicts the export's golden samples and compares. FILE has one event a line, JSON keyed by slot:
{"user": 17, "tags": ["a", "b"], "tags.weight": [1, 0.5], "price": 3.5}; or it is a Parquet file like golden.parquet.
An event may leave out slots with pairs, and slots with histories, counters or statistics of rows: those come from the
export ("event_time" has the event's unix seconds, where windows of counters end; without it, they end now).
With --raw its lines are events of the job's stream (pipe.kind = "columns"); this alone needs Headrace's `dataset`.
"""

import argparse
import json
import math
import os
import re
import sys
import time
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

os.environ["ORT_DISABLE_TELEMETRY"] = "1"  # else it tells its makers of each model, from its import on
import onnxruntime  # noqa: E402

BATCH = 1024
FILLED = ("history", "counters", "statistics", "pairs")  # a slot with one of these is filled by the job, and here
TIME = "event_time"
SIXTHS = [round(2 ** (30 - age / 6)) for age in range(6)]
"""By how much counts with a half-life fade, in 1 / 2 ** 30: whole numbers, so that they round as the job's do."""
DONE = ("_DONE", "DONE")  # the second in exports of an older Headrace


def mix(sign_N, group):
    """The key of a feature id: model.json has the rule, and test vectors."""
    x = sign_N + np.uint64((group + 1) * 0x9E3779B97F4A7C15 % 2**64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def key_of(signs, groups):
    """The key of histories or counters: of one sign, or of several together."""
    key = np.uint64(0)
    for sign, group in zip(signs, groups, strict=True):
        key = mix(np.array([sign], np.uint64) ^ key, group)[0]
    return int(key)


def remembered(file, kind):
    """Histories, or the sub-windows of counters, by key."""
    rows, found = pq.read_table(file).to_pydict(), {}
    if kind == "histories":
        return dict(zip(rows["key"], rows["history"], strict=True))
    if kind == "statistics":
        return dict(zip(rows["key"], np.stack([rows["show"], rows["click"]], 1).astype(np.float32), strict=True))
    columns = (rows[name] for name in ("key", "window_s", "begin_s", "length_s", "shows", "clicks"))
    for key, *sub_window in zip(*columns, strict=True):
        found.setdefault(key, []).append(sub_window)
    return found


def counts_of(counters, sub_windows, now_s):
    """The floats of a slot with counters, at a time; by the rule in model.json."""
    found, prior, weight = [], counters["prior"], counters["prior_weight"]
    lengths_s = [0 if window == "all" else int(window) for window in counters["windows"]]
    lengths_s += [-int(each) for each in counters.get("half_lives", ())]
    for length_s in lengths_s:
        part_s = abs(length_s) // 6 or 1
        mine = [(begin_s // part_s, n, c) for of, begin_s, _, n, c in sub_windows if of == length_s]
        now = int(now_s) // part_s
        if length_s > 0:
            oldest = max([now, *(at for at, _, _ in mine)]) - 6
            mine = [each for each in mine if oldest <= each[0] <= now]
        shows, clicks = sum(n for _, n, _ in mine), sum(c for _, _, c in mine)
        if length_s < 0 and mine:  # one entry, in 1 / 256
            age = max(now - mine[0][0], 0)  # in sixths of the half-life
            shows, clicks = ((n * SIXTHS[age % 6] >> 30 + age // 6) / 256 for n in (shows, clicks))
        ratio = (clicks + prior * weight) / (shows + weight) / prior if shows else 1.0
        kinds = {"shows": math.log1p(shows), "clicks": math.log1p(clicks), "ctr": math.log(ratio)}
        found += [kinds[what] for what in counters["what"]]
    return found


def faded(values, told, since_day):
    """Shows and clicks of an older export, by key, on the day of a newer one: products of 32 bits, day by day."""
    rates = np.array([rate for count, rate in told["decay"] for _ in range(count)], np.float32)
    for rate in rates[since_day:]:
        values = {key: pair * rate for key, pair in values.items()}
    return values


def known_of(shows, clicks):
    """The floats of a slot with statistics for one of its slots, by the rule in model.json."""
    shows, clicks = math.log1p(max(shows, 0.0)), math.log1p(max(clicks, 0.0))
    return [shows, clicks - shows]


def crossed(pairs, samples):
    """The ids of a slot with pairs of slots, for each sample; by the rule in model.json."""
    found = [[] for _ in range(len(samples))]
    for pair in pairs:
        mark = mix(np.array([sign_of(",".join(pair))], np.uint64), 0)
        lists = [samples[name].to_pylist() for name in pair]
        for ids, ones, others in zip(found, *lists, strict=True):
            for one in ones[:32]:
                key = mix(mark ^ np.uint64(one), 0)
                ids += [int(mix(key ^ np.uint64(other), 0)[0]) for other in others[:32]]
    return found


def load(file, table):
    """Keys of a file of rows, and their weights: first-order weight, if any, then vector."""
    rows, parts = pq.read_table(file), []
    if table["first_order"]:
        parts.append(rows["weight"].to_numpy()[:, None])
    if table["dim"]:
        vector_RD = rows["vector"].combine_chunks().flatten().to_numpy().reshape(-1, table["dim"])
        parts.append(vector_RD * rows["scale"].to_numpy()[:, None] if "scale" in rows.column_names else vector_RD)
    return rows["key"].to_pylist(), np.concatenate(parts, 1).astype(np.float32)


def sign_of(value):
    """The feature id of a value: a number is one, a text is hashed by the rule in model.json."""
    if not isinstance(value, str):
        assert isinstance(value, int) and 0 <= value < 2**64, f"{value!r} is no sign: a number of 64 bits, or a text"
        return value
    sign = 14695981039346656037
    for byte in value.encode():
        sign = (sign ^ byte) * 1099511628211 % 2**64
    return sign


def listed(value):
    """A slot's values as a list; an event has a list, one value, or none."""
    return value if isinstance(value, list) else [] if value is None else [value]


def columns_of(event, slot):
    """A slot's columns of one event: ids without padding, cut to max_len, and weights; or a dense slot's values."""
    name, values = slot["name"], listed(event.get(slot["name"]))
    if name not in event and any(kind in slot for kind in FILLED):
        return {}  # the server fills it
    if slot["kind"] == "dense":
        assert len(values) == slot["size"], f"slot {name!r} needs {slot['size']} numbers, and has {len(values)}"
        return {name: values}
    weights = listed(event.get(f"{name}.weight")) or [1.0] * len(values)
    assert len(weights) == len(values), f"slot {name!r} has {len(values)} values and {len(weights)} weights"
    kept = [pair for pair in zip(map(sign_of, values), weights, strict=True) if str(pair[0]) != slot["padding"]]
    if slot["max_len"] is not None:
        kept = kept[-slot["max_len"] :] if slot["keep"] == "tail" else kept[: slot["max_len"]]
    columns = {name: [sign for sign, _ in kept]}
    return columns | ({f"{name}.weight": [weight for _, weight in kept]} if slot["weighted"] else {})


def seconds_of(event, field):
    """The unix seconds in a field of an event; None if it has none."""
    time_s = event.get(field)
    is_time = time_s is None or (isinstance(time_s, int | float) and not isinstance(time_s, bool))
    assert is_time, f"{field!r} is {time_s!r}, and must be a number of unix seconds"
    return time_s


def batches_of(path, slots):
    """Samples of a file of events, in batches."""
    if path.suffix == ".parquet":
        for batch in pq.ParquetFile(path).iter_batches(BATCH):
            yield pa.table(batch.columns, names=batch.schema.names)
        return
    types = {name: pa.list_(pa.uint64()) for name in (slot["name"] for slot in slots if slot["kind"] == "sparse")}
    types |= {f"{name}.weight": pa.list_(pa.float32()) for name in types}
    timed = any("counters" in slot for slot in slots) and TIME not in {slot["name"] for slot in slots}
    with path.open(encoding="utf-8") as lines:
        num_read = 0
        while texts := list(islice(lines, BATCH)):
            columns, times = {}, []
            for number, text in enumerate(texts, num_read + 1):
                try:
                    event = json.loads(text)
                    assert isinstance(event, dict), "an event is a JSON object, keyed by slot"
                    times.append(seconds_of(event, TIME))
                    for slot in slots:
                        for name, values in columns_of(event, slot).items():
                            columns.setdefault(name, []).append(values)
                except (ValueError, AssertionError) as error:
                    sys.exit(f"{path}, line {number}: {error}")
            num_read += len(texts)
            if short := [name for name, column in columns.items() if len(column) < len(texts)]:
                sys.exit(f"{path}: some events have {short[0]!r}, and others leave it to the server: all or none")
            found = {name: pa.array(column, types.get(name)) for name, column in columns.items()}
            if timed:
                found[TIME] = pa.array(times, pa.float64())
            yield pa.table(found)


def raw_batches_of(path, model, time_field):
    """Samples of a file of raw events, in batches, each with the line of each sample."""
    from headrace.dataset.features.served_events import ServedFeatures
    from headrace.errors import BadInput

    if "features" not in model:
        sys.exit('the export has no "features": its job has not pipe.kind = "columns"')
    features, num_read = ServedFeatures(model["features"]), 0
    with path.open("rb") as lines:
        while events := [line.rstrip(b"\n") for line in islice(lines, BATCH)]:
            try:
                samples, event_B = features.samples(events)
            except BadInput as error:
                sys.exit(f"{path}, after line {num_read}: {error}")
            if time_field:
                try:
                    times = [seconds_of(json.loads(event), time_field) for event in events]
                except AssertionError as error:
                    sys.exit(f"{path}, after line {num_read}: {error}")
                if not any(time_s is not None for time_s in times):
                    sys.exit(f"{path}, after line {num_read}: no event has the field {time_field!r} of --time")
                samples = samples.append_column(TIME, pa.array([times[event] for event in event_B], pa.float64()))
            yield samples, (event_B + num_read + 1).tolist()
            num_read += len(events)


def pool(slot, samples, rows, default_W):
    """The inputs of the model for a sparse slot."""
    lists = samples[slot["name"]].combine_chunks()
    sign_N, count_B = lists.flatten().to_numpy(), lists.value_lengths().to_numpy()
    sample_N = np.repeat(np.arange(len(samples)), count_B)
    found = [rows.get(key, default_W) for key in mix(sign_N, slot["group"]).tolist()]
    rows_NW = np.array(found, np.float32).reshape(-1, len(default_W))
    if slot["weighted"]:
        rows_NW = rows_NW * samples[f"{slot['name']}.weight"].combine_chunks().flatten().to_numpy()[:, None]
    if slot["pooling"] == "none":  # a sequence and its mask
        place_N = np.arange(len(sign_N)) - np.repeat(np.cumsum(count_B) - count_B, count_B)
        mask_BL = np.zeros((len(samples), slot["max_len"]), bool)
        rows_BLW = np.zeros((*mask_BL.shape, len(default_W)), np.float32)
        mask_BL[sample_N, place_N], rows_BLW[sample_N, place_N] = True, rows_NW
        return {slot["name"]: rows_BLW, f"{slot['name']}.mask": mask_BL}
    power = {"sum": 0, "sqrtn": 0.5, "mean": 1}[slot["pooling"]]
    pooled_BW = np.zeros((len(samples), len(default_W)), np.float32)
    np.add.at(pooled_BW, sample_N, rows_NW / (count_B[sample_N] ** power)[:, None])
    return {slot["name"]: pooled_BW}


class Server:
    """A model: its rows, and its dense part."""

    def __init__(self, folders):
        if (folders[0] / "current.json").exists():
            chain = json.loads((folders[0] / "current.json").read_text())["chain"]
            if strange := [path for path in chain if not re.fullmatch(r"(t\d+/)?\d+-(base|delta)", path, re.ASCII)]:
                sys.exit(f"{folders[0]}: current.json names {strange[0]!r}, which is no export in this folder")
            folders = [folders[0] / path for path in chain]
        for folder in folders:
            if not any((folder / name).exists() for name in DONE):
                sys.exit(
                    f"{folder}: no complete export, as it has no _DONE; and no stream of exports, without current.json"
                )
        self.newest = folders[-1]
        if not (self.newest / "dense.onnx").exists():
            sys.exit(f"{self.newest}: has no dense.onnx; manifest.json says why")
        self.model = json.loads((self.newest / "model.json").read_text())
        self.session = onnxruntime.InferenceSession(self.newest / "dense.onnx")
        self.rows = {name: {} for name in self.model["tables"]}
        self.memories = {}  # by kind and slot: what the job remembers of each key, where the whole chain has it
        self.days = {}  # by slot: the day of its shows and clicks
        kinds = {"history": "histories", "counters": "counters", "statistics": "statistics"}
        for kind in {kinds[key]: key for slot in self.model["slots"] for key in kinds if key in slot}:
            told = [json.loads((folder / "manifest.json").read_text()).get(kind, {}) for folder in folders]
            self.memories |= {(kind, name): {} for name in told[0] if all(name in each for each in told)}
        for folder in folders:  # the newest row of a key, unless it was deleted
            self.fade(folder)
            self.apply(folder, json.loads((folder / "model.json").read_text())["tables"])

    def fade(self, folder):
        """Bring shows and clicks to the day of the next export."""
        for (kind, name), values in self.memories.items():
            if kind == "statistics":
                told = json.loads((folder / "manifest.json").read_text())[kind][name]
                told = {"day": 0, "decay": [], **told}  # a base of an older Headrace has neither
                self.memories[kind, name] = faded(values, told, self.days.get(name, 0))
                self.days[name] = told["day"]

    def apply(self, folder, tables):
        """Load the rows of one export."""
        for file in folder.glob("*-*-*.parquet"):  # a key is in one file of a folder: their order does not matter
            kind, name = file.stem.rsplit("-", 1)[0].split("-", 1)
            if kind == "rows":
                self.rows[name].update(zip(*load(file, tables[name]), strict=True))
            elif (kind, name) in self.memories:
                self.memories[kind, name].update(remembered(file, kind))
            elif kind == "tombstones":
                of, of_slot = name.split("-", 1) if "-" in name else ("", "")  # "history-<slot>", "counters-<slot>", ..
                of = "histories" if of == "history" else of
                rows = self.rows[name] if name in self.rows else self.memories.get((of, of_slot), {})
                for key in pq.read_table(file)["key"].to_pylist():
                    rows.pop(key, None)

    def filled(self, samples):
        """The samples with what they lack of the slots that the job fills."""
        slots = {slot["name"]: slot for slot in self.model["slots"]}
        for name, slot in slots.items():
            if name in samples.schema.names or not any(kind in slot for kind in FILLED):
                continue
            if "pairs" in slot:
                ids = pa.array(crossed(slot["pairs"], samples), pa.list_(pa.uint64()))
                samples = samples.append_column(name, ids)
                continue
            if "statistics" in slot:
                needed = [("statistics", of) for of in slot["statistics"]["of"]]
            else:
                needed = [("histories" if "history" in slot else "counters", name)]
            if any(each not in self.memories for each in needed):
                sys.exit(f"slot {name!r} is in no event, and the exports do not have what the job remembers for it")
            if "statistics" in slot:
                found = self.known(slot["statistics"]["of"], slots, samples)
            else:
                found = self.of_keys(slot, self.memories[needed[0]], slots, samples)
            kind = pa.uint64() if "history" in slot else pa.float32()
            samples = samples.append_column(name, pa.array(found, pa.list_(kind)))
        return samples

    def known(self, names, slots, samples):
        """The floats of a slot with statistics of rows, for each sample."""
        found = [[] for _ in range(len(samples))]
        for name in names:
            rows, group = self.memories["statistics", name], slots[name]["group"]
            for floats, signs in zip(found, samples[name].to_pylist(), strict=True):
                keys = mix(np.array(signs, np.uint64), group).tolist()
                sums = np.zeros(2)  # of 64 bits
                for key in keys:
                    sums += rows.get(key, 0)
                floats += known_of(*sums.tolist())
        return found

    def of_keys(self, slot, memory, slots, samples):
        """The signs or floats of a slot with a history or counters, for each sample."""
        times = samples[TIME].to_pylist() if TIME in samples.schema.names else [None] * len(samples)
        keys = listed((slot.get("history") or slot["counters"])["key"])
        signs, groups, found = [samples[key].to_pylist() for key in keys], [slots[key]["group"] for key in keys], []
        for time_s, *lists in zip(times, *signs, strict=True):
            known = memory.get(key_of([each[0] for each in lists], groups), []) if all(lists) else []
            if "counters" in slot:
                known = counts_of(slot["counters"], known, time.time() if time_s is None else time_s)
            found.append(known)
        return found

    def predict(self, samples):
        """Predictions by task."""
        feeds, samples = {}, self.filled(samples)
        for slot in self.model["slots"]:
            if slot["kind"] == "sparse":
                default = self.model["tables"][slot["table"]]["default_row"]
                zeros_W = np.zeros(slot["dim"] + slot["first_order"], np.float32)
                default_W = zeros_W if default == "zeros" else np.float32(default)
                feeds |= pool(slot, samples, self.rows[slot["table"]], default_W)
            else:
                feeds[slot["name"]] = np.array(samples[slot["name"]].to_pylist(), np.float32)
        outputs = [each.name for each in self.session.get_outputs()]
        found = dict(zip(outputs, self.session.run(None, feeds), strict=True))
        return {task["name"]: found[task["output"]] for task in self.model["tasks"]}


def compare(server):
    """The exit code: 0 if the golden samples get their golden predictions."""
    if not (server.newest / "golden.parquet").exists():
        sys.exit(
            f"{server.newest}: has no golden.parquet to compare with; predict events of your own with --events FILE"
        )
    golden, worst = pq.read_table(server.newest / "golden.parquet"), 0.0
    for name, found_B in server.predict(golden).items():
        wanted_B = golden[f"prediction.{name}"].to_numpy()
        worst = np.maximum(worst, (np.abs(found_B - wanted_B) / np.maximum(1, np.abs(wanted_B))).max())  # keeps a NaN
    rows = sum(map(len, server.rows.values()))
    print(f"{len(golden)} golden samples, {rows:,} rows: largest difference {worst:.1e}")
    return int(not worst <= 1e-5)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument(
        "--events", type=Path, metavar="FILE", help="predict these events, and print a line of JSON for each"
    )
    parser.add_argument("--raw", action="store_true", help="the events are those of the job's stream")
    parser.add_argument("--time", metavar="FIELD", help="their unix seconds, where windows of counters end; unset: now")
    asked = parser.parse_args()
    if files := [str(path) for path in asked.folders if not path.is_dir()]:
        parser.error(f"{files[0]} is no folder of exports; a file of events is given as --events {files[0]}")
    if asked.time and not asked.raw:
        parser.error(f"--time is for --raw; other events give their unix seconds as {TIME!r}")
    if asked.events is not None and not asked.events.is_file():
        parser.error(f"--events: there is no file {asked.events}")
    server = Server(asked.folders)
    if asked.events is None:
        return compare(server)
    if asked.raw:
        batches = raw_batches_of(asked.events, server.model, asked.time)
    else:
        batches = ((samples, None) for samples in batches_of(asked.events, server.model["slots"]))
    for samples, line_B in batches:
        columns = {name: found_B.tolist() for name, found_B in server.predict(samples).items()}
        if line_B is not None:
            columns = {"line": line_B} | columns
        for values in zip(*columns.values(), strict=True):
            print(json.dumps(dict(zip(columns, values, strict=True))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
