"""The address of a network interface: of IPv4, else of IPv6."""

import pytest

from headrace import address
from headrace.address import address_of
from headrace.errors import SpecError

TABLE = """\
00000000000000000000000000000001 01 80 10 80       lo
fe8000000000000000fc00fffe000001 04 40 20 80    test0
fd770000000000000000000000000012 04 40 00 82    test0
fd770000000000000000000000000013 04 40 00 82    test0
fe8000000000000000fc00fffe000002 05 40 20 80    test1
"""


@pytest.fixture
def table(tmp_path, monkeypatch):
    (tmp_path / "if_inet6").write_text(TABLE)
    monkeypatch.setattr(address, "_IPV6", tmp_path / "if_inet6")
    return tmp_path / "if_inet6"


def test_loopback_has_the_address_of_ipv4(table):
    assert address_of("lo") == "127.0.0.1"


def test_an_interface_without_ipv4_has_its_first_address_that_others_reach(table):
    assert address_of("test0") == "fd77::12"


@pytest.mark.parametrize("name", ["test1", "test", "a-name-that-is-far-too-long"])
def test_an_interface_without_an_address_is_refused_with_those_that_are_there(table, name):
    with pytest.raises(SpecError, match=f"cluster.interface: '{name}' is no interface with an address on .*: .*lo"):
        address_of(name)


def test_a_system_without_ipv6_has_no_such_addresses(table):
    table.unlink()
    with pytest.raises(SpecError):
        address_of("test0")
