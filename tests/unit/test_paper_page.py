"""The page of the paper has the tables of the results that are kept, and every setup of the bench is a job."""

import pytest

from headrace.service.spec.job import load_job
from tests.bench.hybrid.__main__ import PARTS
from tests.bench.hybrid.cluster import HERE
from tests.bench.hybrid.results import RESULTS, Results
from tests.bench.hybrid.setups import MODELS, STRATEGIES, num_parameters
from tests.bench.hybrid.tables import tables
from tests.machines.network import ROOT


def test_the_page_has_the_tables_of_the_results():
    assert tables(Results(RESULTS)) in (ROOT / "docs" / "paper.md").read_text()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_is_a_job(strategy):
    load_job(HERE / "job.toml", [*MODELS["dcn"], *STRATEGIES[strategy], "store.path=never-made"])


def test_no_setup_is_planned_twice():
    setups = [setup for part in PARTS.values() for setup in part]
    assert len(set(setups)) == len(setups)


@pytest.mark.parametrize(
    ("model", "millions"),
    [("wide_deep", 2.11), ("deep_crossing", 2.58), ("deep_crossing_1024", 20.5), ("deep_crossing_7", 12.0)],
)
def test_the_models_have_as_many_dense_parameters_as_the_paper_says(model, millions):
    assert num_parameters(model) / 1e6 == pytest.approx(millions, rel=0.01)
