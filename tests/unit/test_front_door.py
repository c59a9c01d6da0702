"""The checks that every HTTP server of ours makes before an application sees a request."""

import pytest
from starlette.datastructures import Headers

from headrace.http.front_door import is_cross_site, is_known_host, is_too_long, served_names

NAMES = served_names(["Jobs.Example", "[fd00::1]"])


def headers(*pairs: tuple[str, str]) -> Headers:
    return Headers(raw=[(name.encode(), value.encode()) for name, value in pairs])


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:8080", "127.0.0.1:1", "[::1]", "[::1]:80", "jobs.example:443", "[fd00::1]:8080"]
)
def test_a_server_answers_under_its_names(host):
    assert is_known_host(headers(("host", host)), NAMES)


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example", "127.0.0.2", "", "::1", "[fd00::2]"])
def test_it_answers_under_no_other_name(host):
    assert not is_known_host(headers(("host", host)), NAMES)


def test_it_wants_exactly_one_host_header():
    assert not is_known_host(headers(), NAMES)
    assert not is_known_host(headers(("host", "localhost"), ("host", "evil.example")), NAMES)
    assert not is_known_host(headers(("host", "localhost"), ("host", "localhost")), NAMES)


@pytest.mark.parametrize("length", ["11", "-1", "1e1", "", "+5", "٣", "9" * 5000])
def test_a_length_that_is_no_number_or_too_large_is_too_long(length):
    assert is_too_long(headers(("content-length", length)), 10)


@pytest.mark.parametrize("pairs", [[], [("content-length", "0")], [("content-length", "10")]])
def test_other_lengths_are_not(pairs):
    assert not is_too_long(headers(*pairs), 10)


def test_one_foreign_value_of_several_makes_a_request_cross_site():
    ours = [("host", "localhost:1"), ("origin", "http://localhost:1"), ("sec-fetch-site", "same-origin")]
    assert not is_cross_site(headers(*ours))
    assert is_cross_site(headers(*ours, ("origin", "http://evil.example")))
    assert is_cross_site(headers(*ours, ("sec-fetch-site", "cross-site")))
