"""Which jobs `headrace upgrade` refuses before it asks a service."""

import pytest

from headrace.errors import SpecError
from headrace.service.cli.upgrade_command import moved_lines, upgrade


@pytest.mark.parametrize(
    ("job", "everything", "words"),
    [
        ("clicks", True, "either a job or --all"),
        (None, False, "either a job or --all"),
        ("job.toml", False, "is a job file on this machine"),
        ("jobs/clicks", False, "is a job file on this machine"),
    ],
)
def test_what_is_no_name_of_a_job_is_refused(job, everything, words):
    with pytest.raises(SpecError, match=rf"^JOB: .*{words}"):
        upgrade(job, everything=everything)


def test_a_service_without_jobs_is_told():
    assert moved_lines([]) == ["no jobs"]
    assert moved_lines([{"job": "clicks", "was": "", "version": "2"}]) == ["clicks: at rest -> 2"]
