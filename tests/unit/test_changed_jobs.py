"""The job files that tests make from others have the values of those, but for what was changed."""

import tomllib

import pytest

from tests.integration.stream_job import LIVING
from tests.jobs import changed


def test_a_job_file_that_nothing_changes_has_the_same_values():
    assert tomllib.loads(changed(LIVING, {})) == tomllib.loads(LIVING)


def test_keys_are_set_added_and_taken_away():
    found = tomllib.loads(changed(LIVING, {"model": {"class": "a:B"}, "guards.x": [1.5, "ü"], "exports": None}))
    assert found["model"] == {"class": "a:B"} and found["guards"] == {"x": [1.5, "ü"]} and "exports" not in found


def test_a_key_to_take_away_must_be_there():
    with pytest.raises(KeyError):
        changed(LIVING, {"metrics.gauc_of": None})
