"""Authentication and roles: who is accepted, who is refused, and with which answer."""

from http import HTTPStatus

import pytest
from starlette.datastructures import Headers

from headrace.address import network_of
from headrace.service.auth.config import AccessSection
from headrace.service.auth.guard import Guard, Refusal, check_site
from headrace.service.auth.limits import FailedAttempts
from headrace.service.auth.roles import Caller, Role

ANNE = Caller("anne", Role.OPERATOR)


class One:
    """A Lookup of one token."""

    def caller(self, token):
        return ANNE if token == "right" else None

    def at_once(self, token):
        return ANNE if token == "right" else None


class Clock:
    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


def guard(now=lambda: 0.0, **access):
    return Guard(AccessSection(**access), One(), now=now)


def refused(act, *arguments):
    with pytest.raises(Refusal) as caught:
        act(*arguments)
    return caught.value


def test_who_may_is_let_in_at_once_and_everybody_else_is_looked_at():
    for anonymous, role, let_in in (("none", Role.VIEWER, False), ("viewer", Role.VIEWER, True)):
        door = guard(anonymous=anonymous)
        assert (door.at_once([], role) is not None) == let_in
    door = guard(anonymous="admin")
    assert door.at_once(["Bearer right"], Role.OPERATOR) == ANNE
    assert door.at_once(["Bearer right"], Role.ADMIN) is None  # their own role, not anybody's
    for wrong in (["Bearer wrong"], ["right"], ["Bearer right", "Bearer right"], [""]):
        assert door.at_once(wrong, Role.VIEWER) is None


def test_roles_are_in_order_and_a_word_that_is_none_is_told_those_there_are():
    assert Role.VIEWER < Role.OPERATOR < Role.ADMIN
    assert [Role.of(role.word) for role in Role] == list(Role)
    with pytest.raises(ValueError, match="'root'; there are viewer, operator, admin"):
        Role.of("root")


def test_a_right_token_is_its_holder_whatever_the_case_of_the_scheme():
    for scheme in ("Bearer", "bearer", "BEARER"):
        assert guard().caller([f"{scheme} right"], "10.0.0.1") == ANNE


@pytest.mark.parametrize(
    "headers",
    [["Bearer wrong"], ["Basic right"], ["right"], ["Bearer"], [""], ["Bearer right", "Bearer right"], ["Bearer a b"]],
)
def test_what_is_no_right_token_is_refused_alike_and_asked_for_one(headers):
    refusal = refused(guard(anonymous="admin").caller, headers, "10.0.0.1")
    assert refusal.status == HTTPStatus.UNAUTHORIZED
    assert refusal.headers["WWW-Authenticate"].startswith("Bearer")
    assert "not known here" in refusal.detail


def test_without_a_token_nobody_has_a_role_unless_the_owner_says_so():
    door = guard()
    refusal = refused(door.admit, door.caller([], "x"), Role.VIEWER)
    assert refusal.status == HTTPStatus.UNAUTHORIZED
    open_door = guard(anonymous="viewer")
    assert open_door.admit(open_door.caller([], "x"), Role.VIEWER).name == "anonymous"
    assert refused(open_door.admit, open_door.caller([], "x"), Role.OPERATOR).status == HTTPStatus.UNAUTHORIZED


def test_who_has_too_low_a_role_is_told_which_one_is_needed():
    refusal = refused(guard().admit, ANNE, Role.ADMIN)
    assert refusal.status == HTTPStatus.FORBIDDEN
    assert "role admin" in refusal.detail and "'anne' has operator" in refusal.detail


def test_on_loopback_a_foreground_run_is_read_by_all_and_may_be_asked_for_a_commit_only():
    door = Guard.of_a_run()
    caller = door.caller([], "127.0.0.1")
    assert door.admit(caller, Role.VIEWER) == caller
    assert door.admit(caller, Role.OPERATOR, "commit") == caller
    assert refused(door.admit, caller, Role.OPERATOR).status == HTTPStatus.UNAUTHORIZED
    assert refused(door.admit, caller, Role.OPERATOR, "shrink").status == HTTPStatus.UNAUTHORIZED


def test_many_wrong_tokens_make_their_address_wait_others_and_right_tokens_not():
    clock = Clock()
    door = guard(clock, max_failures=3, failures_per_s=0.5)
    statuses = [refused(door.caller, ["Bearer wrong"], "10.0.0.1").status for _ in range(4)]
    assert statuses == [HTTPStatus.UNAUTHORIZED] * 3 + [HTTPStatus.TOO_MANY_REQUESTS]
    assert refused(door.caller, ["Bearer wrong"], "10.0.0.1").headers == {"Retry-After": "3"}
    assert door.caller(["Bearer right"], "10.0.0.1") == ANNE
    assert refused(door.caller, ["Bearer wrong"], "10.0.0.2").status == HTTPStatus.UNAUTHORIZED
    clock.now_s += 3
    assert refused(door.caller, ["Bearer wrong"], "10.0.0.1").status == HTTPStatus.UNAUTHORIZED


def test_addresses_that_failed_are_remembered_up_to_a_bound_the_oldest_going_first():
    failures = FailedAttempts(1, 0.001, max_addresses=2)
    assert [failures.failed(address, 0.0) for address in ("a", "b", "c")] == [0, 0, 0]
    assert len(failures) == 2
    assert failures.failed("c", 0.0) > 0
    assert failures.failed("a", 0.0) == 0


def test_a_clock_that_goes_back_gives_no_tries():
    failures = FailedAttempts(1, 1.0)
    assert failures.failed("a", 100.0) == 0
    assert failures.failed("a", 50.0) > 0


def test_all_addresses_of_one_ipv6_network_count_as_one():
    assert network_of("2001:db8:1:2::1") == network_of("2001:db8:1:2:ffff::9") != network_of("2001:db8:1:3::1")
    assert network_of("::ffff:10.0.0.1") == network_of("10.0.0.1")
    assert network_of("fe80::1%eth0") == network_of("fe80::2")
    assert len(network_of("x" * 1000)) == 64


@pytest.mark.parametrize(
    ("headers", "allowed"),
    [
        ({}, True),
        ({"sec-fetch-site": "same-origin", "origin": "http://localhost:8080", "host": "localhost:8080"}, True),
        ({"sec-fetch-site": "none"}, True),
        ({"sec-fetch-site": "cross-site"}, False),
        ({"sec-fetch-site": "same-site"}, False),
        ({"origin": "https://evil.example", "host": "localhost:8080"}, False),
        ({"origin": "http://localhost:9000", "host": "localhost:8080"}, False),
        ({"origin": "null", "host": "localhost:8080"}, False),
        ({"origin": "http://[", "host": "localhost:8080"}, False),
        ({"origin": "null"}, False),
    ],
)
def test_pages_of_other_sites_change_nothing(headers, allowed):
    if allowed:
        check_site(Headers(headers))
    else:
        assert refused(check_site, Headers(headers)).status == HTTPStatus.FORBIDDEN
