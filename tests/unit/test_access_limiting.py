from headrace.service.auth.limits import CallerShares, share_key
from headrace.service.auth.roles import Caller, Role


def test_what_one_holds_is_bounded_and_what_is_given_back_is_free_again():
    shares = CallerShares(2)
    assert [shares.take("ann") for _ in range(3)] == [True, True, False]
    assert shares.take("bob")
    shares.give_back("ann")
    assert shares.take("ann") and not shares.take("ann")


def test_a_share_is_of_a_token_or_else_of_an_address():
    anonymous = Caller("anonymous", Role.VIEWER)
    assert share_key(Caller("ann", Role.VIEWER), "10.0.0.1") == share_key(Caller("ann", Role.VIEWER), "10.0.0.2")
    assert share_key(anonymous, "10.0.0.1") != share_key(anonymous, "10.0.0.2")
    assert share_key(anonymous, "2001:db8::1") == share_key(anonymous, "2001:db8::2")  # one network, one person
