"""A job whose arithmetic changed since its commit is told as forked; one whose job file changed is not."""

from types import SimpleNamespace

import pytest
import torch

from headrace.trainer.dense_config import DenseSection
from headrace.trainer.train.assembly import changed_arithmetic
from headrace.trainer.train.device import MAKER, fingerprint, maker_in, merged_rows
from tests.unit.test_defaults import RAW

HERE = fingerprint(torch.device("cpu"))
MERGES = DenseSection(accumulate=4)


def commit(made_with, **train):
    return SimpleNamespace(manifest=SimpleNamespace(fingerprint=made_with), state={"spec": {**RAW, "train": train}})


@pytest.mark.parametrize(
    ("made", "now"),
    [
        (commit(HERE), DenseSection()),
        (commit(HERE), MERGES),  # only the job file has changed
        (commit(HERE | merged_rows(MERGES), accumulate=4), MERGES),
        (commit(HERE | merged_rows(MERGES), accumulate=4), DenseSection()),
        (commit({}), MERGES),  # an import
        (None, MERGES),
    ],
)
def test_a_changed_job_file_is_no_change_of_arithmetic(made, now):
    assert changed_arithmetic(made, HERE | merged_rows(now)) == []


def test_a_commit_from_before_rows_were_merged_is_told():
    (told,) = changed_arithmetic(commit(HERE, accumulate=4), HERE | merged_rows(MERGES))
    assert told == "accumulate was None, is rows and dense"


def test_another_maker_of_the_processor_is_told_where_the_commit_names_one():
    (told,) = changed_arithmetic(commit(HERE | {MAKER: "another"}), HERE)
    assert told == f"maker was another, is {HERE[MAKER]}"
    assert changed_arithmetic(commit({name: HERE[name] for name in HERE if name != MAKER}), HERE) == []


@pytest.mark.parametrize(
    ("facts", "maker"),
    [
        ("processor\t: 0\nvendor_id\t: AuthenticAMD\nmodel name\t: an: odd name\n", "AuthenticAMD"),
        ("processor\t: 0\nCPU implementer\t: 0x41\n", "0x41"),
        ("", "unknown"),
    ],
)
def test_the_maker_is_read_from_what_the_kernel_says(facts, maker):
    assert maker_in(facts) == maker


def test_another_library_is_told():
    (told,) = changed_arithmetic(commit(HERE | {"torch": "1"}), HERE)
    assert told == f"torch was 1, is {HERE['torch']}"
