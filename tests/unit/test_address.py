"""host:port, and the names of this machine."""

import pytest

from headrace.address import LOCAL_NAMES, format_address, host_of, is_loopback, parse_address


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("127.0.0.1:8080", "127.0.0.1", 8080), ("host.example:0", "host.example", 0), ("[::1]:65535", "::1", 65535)],
)
def test_an_address_is_parsed_and_written_alike(text, host, port):
    assert parse_address(text) == (host, port)
    assert format_address(host, port) == text


@pytest.mark.parametrize("text", ["8080", ":8080", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:65536", "host:-1", ""])
def test_another_text_is_refused_with_an_example(text):
    with pytest.raises(ValueError) as caught:
        parse_address(text, "127.0.0.1:8090")
    assert str(caught.value) == f"{text!r} is not of the form 127.0.0.1:8090"


@pytest.mark.parametrize("host", [*LOCAL_NAMES, "127.8.8.8"])
def test_loopback_is_this_machine(host):
    assert is_loopback(host)


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "10.0.0.1", "127.0.0.1.evil.example", "0x7f.1", "localhost.evil", ""]
)
def test_other_hosts_are_not(host):
    assert not is_loopback(host)


@pytest.mark.parametrize(
    ("header", "host"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("LocalHost:8080", "localhost"),
        ("[::1]:8080", "::1"),
        ("[::1]", "::1"),
        ("evil.example:80", "evil.example"),
        ("localhost.evil.example", "localhost.evil.example"),
        ("::1", ""),
        ("[::1", ""),
        ("[::1]x", ""),
        ("::1]", ""),
        ("[[::1]]", ""),
        ("localhost:80:80", ""),
        ("localhost/x", ""),
        ("localhost:x", ""),
        ("a@localhost", ""),
        ("", ""),
    ],
)
def test_the_name_of_a_host_header(header, host):
    assert host_of(header) == host
