"""Serves exports without Millrace: python serve.py FOLDER, where current.json is; or a base and the deltas after it."""

import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pyarrow.parquet as pq


def mix(sign_N, group):
    """The key of a sign: model.json says the rule, and has vectors to try it with."""
    x = sign_N + np.uint64((group + 1) * 0x9E3779B97F4A7C15 % 2**64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def load(file, table):
    """Keys of a file of rows, and their weights side by side: first-order weight, if any, then vector."""
    rows, parts = pq.read_table(file), []
    if table["first_order"]:
        parts.append(rows["weight"].to_numpy()[:, None])
    if table["dim"]:
        vector_RD = rows["vector"].combine_chunks().flatten().to_numpy().reshape(-1, table["dim"])
        parts.append(vector_RD * rows["scale"].to_numpy()[:, None] if table["dtype"] == "int8" else vector_RD)
    return rows["key"].to_pylist(), np.concatenate(parts, 1).astype(np.float32)


def pool(slot, golden, rows, default_W):
    """The inputs that a sparse slot gives the model."""
    lists = golden[slot["name"]].combine_chunks()
    sign_N, count_B = lists.flatten().to_numpy(), lists.value_lengths().to_numpy()
    sample_N = np.repeat(np.arange(len(golden)), count_B)
    found = [rows.get(key, default_W) for key in mix(sign_N, slot["group"]).tolist()]
    rows_NW = np.array(found, np.float32).reshape(-1, len(default_W))
    if slot["weighted"]:
        rows_NW = rows_NW * golden[f"{slot['name']}.weight"].combine_chunks().flatten().to_numpy()[:, None]
    if slot["pooling"] == "none":  # a sequence and its mask
        place_N = np.arange(len(sign_N)) - np.repeat(np.cumsum(count_B) - count_B, count_B)
        mask_BL = np.zeros((len(golden), slot["max_len"]), bool)
        rows_BLW = np.zeros((*mask_BL.shape, len(default_W)), np.float32)
        mask_BL[sample_N, place_N], rows_BLW[sample_N, place_N] = True, rows_NW
        return {slot["name"]: rows_BLW, f"{slot['name']}.mask": mask_BL}
    power = {"sum": 0, "sqrtn": 0.5, "mean": 1}[slot["pooling"]]
    pooled_BW = np.zeros((len(golden), len(default_W)), np.float32)
    np.add.at(pooled_BW, sample_N, rows_NW / (count_B[sample_N] ** power)[:, None])
    return {slot["name"]: pooled_BW}


def main(folders):
    if (folders[0] / "current.json").exists():
        folders = [folders[0] / path for path in json.loads((folders[0] / "current.json").read_text())["chain"]]
    markers = ("_DONE", "DONE")  # the second in exports of an older Millrace
    complete = all(any((folder / name).exists() for name in markers) for folder in folders)
    assert complete, "an export without _DONE is not complete"
    newest = folders[-1]
    model = json.loads((newest / "model.json").read_text())
    golden = pq.read_table(newest / "golden.parquet")
    session = onnxruntime.InferenceSession(newest / "dense.onnx")

    rows, feeds = {name: {} for name in model["tables"]}, {}
    for folder in folders:  # the newest row of a key, unless it is gone
        tables = json.loads((folder / "model.json").read_text())["tables"]
        for file in folder.glob("*-*-*.parquet"):  # a key is in one file of a folder: their order does not matter
            kind, name = file.stem.rsplit("-", 1)[0].split("-", 1)
            if kind == "rows":
                rows[name].update(zip(*load(file, tables[name]), strict=True))
            else:
                for key in pq.read_table(file)["key"].to_pylist():
                    rows[name].pop(key, None)
    for slot in model["slots"]:
        if slot["kind"] == "sparse":
            default = model["tables"][slot["table"]]["default_row"]
            zeros_W = np.zeros(slot["dim"] + slot["first_order"], np.float32)
            feeds |= pool(slot, golden, rows[slot["table"]], zeros_W if default == "zeros" else np.float32(default))
        else:
            feeds[slot["name"]] = np.array(golden[slot["name"]].to_pylist(), np.float32)
    found = dict(zip((each.name for each in session.get_outputs()), session.run(None, feeds), strict=True))
    wanted = {task["output"]: golden[f"prediction.{task['name']}"].to_numpy() for task in model["tasks"]}
    worst = max(
        float((np.abs(found[name] - wanted[name]) / np.maximum(1, np.abs(wanted[name]))).max()) for name in wanted
    )
    print(f"{len(golden)} golden samples, {sum(map(len, rows.values())):,} rows: largest difference {worst:.1e}")
    return not worst <= 1e-5


if __name__ == "__main__":
    sys.exit(main([Path(folder) for folder in sys.argv[1:]]))
