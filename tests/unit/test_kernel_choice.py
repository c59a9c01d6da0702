"""The choice of kernels: when a job gets a table, what a measurement decides, and for which passes a table holds."""

from itertools import chain, repeat

import pytest
import torch
from torch import nn

from headrace.trainer.collectives.ranks import SingleRank
from headrace.trainer.config import TrainSection
from headrace.trainer.journal.records import MatmulOperation
from headrace.trainer.models.linear import Kernel, Linear, sizes_of
from headrace.trainer.rank0.recovery import RestartPoint
from headrace.trainer.train import kernel_choice
from headrace.trainer.train.device import MAKER
from headrace.trainer.train.kernel_choice import (
    MIN_MULTIPLICATIONS,
    KernelSchedule,
    agreed_schedule,
    is_due,
    measured_table,
    quicker,
)
from tests.integration import stream_job
from tests.unit.test_linear import needs_onednn

HERE, ELSEWHERE, OLD = {"cpu": "A", MAKER: "M"}, {"cpu": "B", MAKER: "M"}, {"cpu": "A"}
ONEDNN = dict.fromkeys(("forward", "input_gradient", "weight_gradient"), "onednn")


def table(setting="measured", where=HERE, **kernels):
    return MatmulOperation(setting=setting, kernels=kernels, fingerprint=where)


def point(*tables, closed=0, joblog=None):
    return RestartPoint("t1", None, (), 0, matmuls=tables, closed=closed, joblog=joblog)


@pytest.mark.parametrize(
    ("beginning", "setting", "due"),
    [
        (point(), "measured", True),
        (point(), "mkl", True),
        (point(closed=3), "measured", False),  # begun before there were tables
        (point(closed=3), "onednn", True),
        (point((1, table())), "measured", False),
        (point((1, table()), closed=3), "measured", False),
        (point((1, table(where=ELSEWHERE)), closed=3), "measured", True),
        (point((1, table(where=OLD)), closed=3), "measured", False),  # it does not name the processor's maker
        (point((1, table("mkl", ELSEWHERE)), closed=3), "mkl", False),
        (point((1, table()), closed=3), "mkl", True),
        (point((1, table("mkl")), closed=3), "measured", True),
        (point((1, table(where=ELSEWHERE)), (3, table())), "measured", False),
    ],
)
def test_a_table_is_made_once_unless_setting_or_environment_differ(beginning, setting, due):
    assert is_due(beginning, setting, HERE) is due


class Joblog:
    def __init__(self):
        self.appended = []

    def append(self, content):
        self.appended.append(content)


@needs_onednn
@pytest.mark.parametrize("logged_only", [False, True])
def test_a_due_table_is_logged_and_holds_from_the_next_pass(logged_only):
    log, old = Joblog(), (1, table("mkl"))
    model = nn.Sequential(Linear(3, 2), nn.Linear(2, 1))
    beginning = point(old, closed=7, joblog=log)
    train = TrainSection(matmul="onednn")
    schedule = agreed_schedule(SingleRank(), beginning, model, train, HERE, None, logged_only=logged_only)
    if logged_only:
        assert schedule.logged == [old] and not log.appended
        return
    assert log.appended == [table("onednn", **{"3x2": ONEDNN})]
    for number, kernels in ((7, {}), (8, {"3x2": ONEDNN}), (20, {"3x2": ONEDNN})):
        assert schedule.operation(number).kernels == schedule.saved(number)["kernels"] == kernels
        schedule.use(model, number)
        assert bool(model[0].kernels) == bool(kernels)
    again = point(*schedule.logged, closed=9, joblog=log)
    assert agreed_schedule(SingleRank(), again, model, train, HERE, None, logged_only=False) == schedule
    assert len(log.appended) == 1


def test_the_table_of_another_job_takes_the_place_of_a_measurement(monkeypatch):
    monkeypatch.setattr(kernel_choice, "measured_table", lambda *_: pytest.fail("measured"))
    log = Joblog()
    model, handed = nn.Sequential(Linear(3, 2)), {"3x2": ONEDNN}
    beginning = point(joblog=log)
    found = agreed_schedule(SingleRank(), beginning, model, TrainSection(), HERE, handed, logged_only=False)
    assert found.operation(1).kernels == handed == log.appended[0].kernels


@pytest.mark.parametrize("train", [TrainSection(matmul="mkl"), TrainSection(matmul="onednn", amp="bfloat16")])
def test_a_job_without_a_choice_logs_an_empty_table(train):
    log = Joblog()
    beginning = point(joblog=log)
    schedule = agreed_schedule(
        SingleRank(), beginning, nn.Sequential(Linear(3, 2)), train, HERE, None, logged_only=False
    )
    assert [each.kernels for each in log.appended] == [{}] == [schedule.operation(1).kernels]
    assert KernelSchedule().operation(1) is None is KernelSchedule().saved(1)


@pytest.mark.parametrize(
    ("mkl_s", "onednn_s", "chosen"),
    [(1.0, 0.89, Kernel.ONEDNN), (1.0, 0.91, Kernel.MKL), (1.0, 1.0, Kernel.MKL), (1.0, 2.0, Kernel.MKL)],
)
def test_onednn_must_be_clearly_quicker(mkl_s, onednn_s, chosen):
    now, lasts = (
        [0.0],
        {Kernel.MKL: chain([9.0, mkl_s], repeat(5.0)), Kernel.ONEDNN: chain([9.0, 7.0], repeat(onednn_s))},
    )

    def product(kernel):
        now[0] += next(lasts[kernel])
        return torch.zeros(1)

    assert quicker(product, lambda: now[0]) is chosen


def test_only_large_products_are_measured_and_at_no_more_samples_than_are_needed(monkeypatch):
    measured = []
    monkeypatch.setattr(kernel_choice, "_measured", lambda size, samples: measured.append((size, samples)))
    measured_table([(10, 10), (400, 400), (416, 400)], 4096)
    assert measured == [((400, 400), 4096), ((416, 400), 4096)]
    measured.clear()
    measured_table([(size, 1000) for size in range(1000, 1020)], 4096)
    assert len(measured) == 20 and {samples for _, samples in measured} == {74}


@needs_onednn
def test_a_measurement_names_all_products_of_a_size():
    found = measured_table([(64, 64), (2, 2)], MIN_MULTIPLICATIONS // (64 * 64))
    assert [*found] == [(64, 64)]


def test_the_jobs_whose_digests_the_tests_compare_are_too_small_to_be_measured(tmp_path):
    """Two jobs that measure may choose otherwise. A larger job in a comparison sets train.matmul."""
    from headrace.dataset.spec.schema import Schema
    from headrace.service.spec.job import load_job
    from headrace.trainer.train.model_building import build_model

    root = stream_job.Path(__file__).resolve().parents[2]
    (tmp_path / "small.toml").write_text(stream_job.SPEC)
    (tmp_path / "living.toml").write_text(stream_job.LIVING)
    jobs = [tmp_path / "small.toml", tmp_path / "living.toml", root / "tests/golden/store-of-defaults-1/job.toml"]
    for path in [*jobs, root / "deploy/examples/clicks/job.toml", root / "deploy/examples/news/job.toml"]:
        job = load_job(path)
        model = build_model(job.spec, Schema.of(job.spec.slots), path.parent, torch.device("cpu"))
        sizes = sizes_of(model)
        assert sizes and max(i * o for i, o in sizes) * job.spec.train.batch_size < MIN_MULTIPLICATIONS, path
