"""With rows on the device the host waits for the device once a step; twice where first-order weights follow events."""

import pytest
import torch

from headrace.trainer import device_copies
from headrace.trainer.train import assembly, device_rows, row_learning
from headrace.trainer.train.loop import TrainLoop
from tests.fakes.devices import needs_gpu
from tests.fakes.recording_device import DEVICE, recorded
from tests.integration.stream_job import write_living_job
from tests.integration.test_device_row_jobs import SPEC
from tests.integration.trainer_here import run

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]


def root_of_kernels(values):
    """The root on a CPU (trainer.train.row_learning); the recording device has the CPU's arithmetic."""
    return values.double().sqrt().float()


@pytest.mark.parametrize(("in_batch", "waits"), [("true", 2), ("false", 1)])
def test_the_host_waits_once_a_step_and_bits_are_those_of_the_host(in_batch, waits, tmp_path, monkeypatch):
    """Predictions, losses, flags and the state of the calibration come together. `in_batch` needs logits on the way."""
    job = write_living_job(tmp_path, num_parts=1, num_lines=240, spec=SPEC)
    settings, steps = (f"tables.default.in_batch={in_batch}", "train.calibrate=true"), []
    learn = TrainLoop._learn  # noqa: SLF001

    with recorded() as recording:

        def counted(loop, *given):
            before = len(recording.waits)
            found = learn(loop, *given)
            steps.append(recording.waits[before:])
            return found

        monkeypatch.setattr(TrainLoop, "_learn", counted)
        monkeypatch.setattr(assembly, "pick_device", lambda *_: DEVICE)
        for module in (row_learning, device_rows):
            monkeypatch.setattr(module, "root", root_of_kernels)
        there = run(job, tmp_path / "device", "train.rows=device", *settings)
    monkeypatch.undo()
    assert len(steps) >= 4 and steps == [["the step"] * waits] * len(steps)
    assert there == run(job, tmp_path / "host", *settings)


@needs_gpu
def test_torch_finds_no_other_wait_on_a_gpu(tmp_path, monkeypatch):
    """Its debug mode refuses each wait that is not asked for by name, and those that are asked for are counted."""
    job = write_living_job(tmp_path, num_parts=1, num_lines=240, spec=SPEC)
    learn, wait, waited = TrainLoop._learn, device_copies.wait_for, []  # noqa: SLF001

    def watched(loop, *given):
        torch.cuda.set_sync_debug_mode("error")
        try:
            return learn(loop, *given)
        finally:
            torch.cuda.set_sync_debug_mode("default")
            waited.append("step")

    def counted(device):
        waited.append("wait")
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("default")
        wait(device)
        torch.cuda.set_sync_debug_mode(mode)

    monkeypatch.setattr(TrainLoop, "_learn", watched)
    monkeypatch.setattr(device_copies, "wait_for", counted)
    run(job, tmp_path / "device", "train.device=cuda", "train.rows=device", "tables.default.in_batch=false")
    assert waited == ["wait", "step"] * (len(waited) // 2) != []
