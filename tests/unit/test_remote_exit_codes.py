"""A command ends with the same code, whether the job is a file here or a service's."""

from http import HTTPStatus

import httpx
import pytest

from headrace.deadline import Deadline
from headrace.errors import SpecError
from headrace.service.cli.export_commands import choose_stream
from headrace.service.cli.targets import path_of
from headrace.service.python.rest_client import NotFound, ServiceClient
from headrace.service.spec.job import load_job
from tests.integration.stream_job import write_job


def no_stream(_request):
    return httpx.Response(HTTPStatus.NOT_FOUND, json={"title": "Not Found", "detail": "the job has no stream 'nope'"})


def test_an_unknown_stream_ends_the_command_as_it_does_here(tmp_path):
    with pytest.raises(SpecError) as here:
        choose_stream(load_job(write_job(tmp_path, num_parts=1)), "nope")
    with (
        ServiceClient("http://there", transport=httpx.MockTransport(no_stream)) as client,
        pytest.raises(NotFound) as there,
    ):
        client.carry_out(path_of("jobs", "small", "exports"), {"stream": "nope"}, Deadline.after(1))
    assert there.value.exit_code == here.value.exit_code == 2


def test_an_unknown_job_ends_the_command_as_a_job_file_that_is_not_there(tmp_path):
    with pytest.raises(SpecError) as here:
        load_job(tmp_path / "nothing.toml")
    assert NotFound.exit_code == here.value.exit_code
