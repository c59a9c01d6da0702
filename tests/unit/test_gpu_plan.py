"""What `make gpu` would run, and the table that it writes: it must be right where nobody could try it."""

import sys
from pathlib import Path

from tests.bench import gpu

RATE = {"code": 0, "took_s": 1.0}


def test_it_runs_every_test_that_needs_a_gpu_and_every_rate():
    parts = {part.name: part for part in gpu.plan("cuda", Path("w1.npz"))}
    command = parts["tests"].command
    of_processes = "contract/test_sums_of_processes", "contract/test_row_exchange"
    for name in ("integration/test_cuda_jobs", "unit/test_device_rows", *of_processes):
        assert f"tests/{name}.py" in command
    wheres = {"rows on the device", "rows on the host", "plain PyTorch", "FBGEMM's TBE"}
    assert {name for name in parts if "profile" not in name and name.startswith("W1/")} == {
        f"W1/{hidden}, {where}" for hidden in (64, 400) for where in wheres
    }
    assert "--set train.rows=device" in " ".join(parts["W1/64, rows on the device"].command)


def test_a_part_that_fails_or_takes_too_long_is_noted():
    broken = gpu.Part("broken", (sys.executable, "-c", "print('why'); raise SystemExit(3)"), 30, {})
    found = gpu.run(broken)
    assert found["code"] == 3 and "why" in str(found["said"])
    assert gpu.in_words(found) == "FAILED with code 3: why"
    assert gpu.run(gpu.Part("slow", (sys.executable, "-c", "import time; time.sleep(30)"), 0.1, {}))["code"] == 124
    mute = gpu.run(gpu.Part("mute", (sys.executable, "-c", "print('no rate')"), 30, {}, rate=True))
    assert mute["code"] == 1 and "no rate" in str(mute["said"]) and "not JSON" in gpu.in_words(mute)
    assert gpu.run(gpu.Part("absent", ("no-such-program",), 1, {}))["code"] == 127


def test_the_table_compares_with_plain_pytorch_and_names_what_did_not_run():
    found = {
        "W1/64, rows on the device": RATE | {"samples_per_s": 3000.0},
        "W1/64, plain PyTorch": RATE | {"samples_per_s": 2000.0},
        "W1/64, FBGEMM's TBE": {"code": 1, "said": "no wheel"},
    }
    lines = gpu.table(found).splitlines()
    assert "| 64, rows on the device | 3,000 | 1.50 |" in lines
    assert "| 64, FBGEMM's TBE | did not run | - |" in lines


def test_a_table_says_where_its_rates_are_from():
    here = {"device": "cpu", "gpu": None, "cuda": None, "cores": 2, "torch": "2.13.0"}
    assert "no rates of a GPU, 2 cores, torch 2.13.0" in gpu.conditions(here)
    there = here | {"device": "cuda", "gpu": "NVIDIA H200", "cuda": "13.0"}
    said = gpu.conditions(there)
    assert said.startswith("150 steps of 4,096 samples") and "; NVIDIA H200, CUDA 13.0, 2 cores" in said
