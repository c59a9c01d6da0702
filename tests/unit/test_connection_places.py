"""Which connection gives way to a new one."""

from headrace.connection_places import Place, yielding


def place(address, *, proven=False, waits=True):
    made = Place.of(address, lambda: None)
    made.proven, made.waits = proven, lambda: waits
    return made


def test_the_oldest_of_the_network_with_most_gives_way():
    alone, first, second = place("10.0.0.1"), place("10.0.0.2"), place("10.0.0.2")
    assert yielding([alone, first, second]) is first
    assert yielding([alone, second]) is alone
    assert yielding([place("2001:db8::1"), alone, last := place("2001:db8::ffff:1")]) is not alone is not last


def test_a_token_keeps_a_place_as_long_as_strangers_have_some():
    known, other = place("10.0.0.1", proven=True), place("10.0.0.1", proven=True)
    stranger = place("10.0.0.2")
    assert yielding([known, other, stranger]) is stranger
    assert yielding([known, other]) is known


def test_a_request_under_way_is_ended_only_where_one_network_has_most_places():
    busy, other = place("10.0.0.1", waits=False), place("10.0.0.1", waits=False)
    known = place("10.0.0.1", proven=True, waits=False)
    assert yielding([busy, place("10.0.0.9", proven=True)]).proven
    assert yielding([known, busy, other], "10.0.0.2") is busy
    assert yielding([known, busy, other], "10.0.0.1") is None
    assert yielding([known, busy, place("10.0.0.3", waits=False)], "10.0.0.2") is None
    assert yielding([known, known], "10.0.0.2") is None
