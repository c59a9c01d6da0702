"""Tokens: created, stored as hashes, looked up, expired, revoked; alike in memory and in the database."""

import hmac
from datetime import UTC, datetime, timedelta

import pytest

from headrace.errors import SpecError, Unavailable
from headrace.service.auth import tokens as module
from headrace.service.auth.roles import Caller, Role
from headrace.service.auth.token_store import StoredTokens
from headrace.service.auth.tokens import (
    MAX_TOKENS,
    NOTE_USE_S,
    RELOAD_S,
    MemoryTokenRows,
    Tokens,
    check_room,
    new_token,
)
from headrace.service.records.database import opened

START = datetime(2026, 1, 1, tzinfo=UTC)


class Time:
    """Both clocks, moved by hand."""

    def __init__(self):
        self.s = 0.0

    def date(self):
        return START + timedelta(seconds=self.s)

    def now(self):
        return self.s


@pytest.fixture
def time():
    return Time()


@pytest.fixture(params=["memory", "sqlite", "postgresql"])
def rows(request, tmp_path):
    if request.param == "memory":
        yield MemoryTokenRows()
        return
    in_file = request.param == "sqlite"
    url = f"sqlite:///{tmp_path / 'records.db'}" if in_file else request.getfixturevalue("postgres").database()
    with opened(url) as records:
        yield StoredTokens(records)


@pytest.fixture
def tokens(rows, time):
    return Tokens(rows, time.date, time.now)


def test_a_token_is_its_holder_and_a_changed_one_nobody(tokens):
    token, text = tokens.create("anne", Role.OPERATOR)
    assert tokens.caller(text) == Caller("anne", Role.OPERATOR)
    last = "0" if text[-1] != "0" else "1"
    other = "mlr_" + "0" * 16 + text[20:]
    for wrong in (text[:-1] + last, text[:-1], text + "0", other, text.upper(), f" {text}", f"{text}\n", "", token.id):
        assert tokens.caller(wrong) is None, wrong


def test_a_holder_is_known_at_once_while_the_copy_is_young_and_the_use_is_noted(tokens, time):
    anne = Caller("anne", Role.VIEWER)
    _, text = tokens.create("anne", Role.VIEWER)
    assert tokens.at_once(text) is None  # nobody has looked
    assert tokens.caller(text) == anne and tokens.at_once(text) == anne
    assert tokens.at_once(text[:-1] + ("0" if text[-1] != "0" else "1")) is None
    time.s += RELOAD_S
    assert tokens.at_once(text) is None
    assert tokens.caller(text) == anne and tokens.at_once(text) == anne
    time.s += NOTE_USE_S
    assert tokens.caller("") is None  # the copy is young again, but the use is to be noted
    assert tokens.at_once(text) is None
    assert tokens.caller(text) == anne and tokens.at_once(text) == anne
    tokens.revoke("anne")
    assert tokens.at_once(text) is None is tokens.caller(text)


def test_two_tokens_have_nothing_in_common_and_256_bits_each():
    (first, text), (second, other) = (new_token("anne", Role.VIEWER, START) for _ in range(2))
    assert first.id != second.id and first.salt != second.salt and first.hash != second.hash
    assert len(bytes.fromhex(text.rpartition("_")[2])) == 32 and text != other


def test_the_secret_is_kept_nowhere_and_not_shown(tokens, tmp_path):
    token, text = tokens.create("anne", Role.OPERATOR)
    secret = text.rpartition("_")[2]
    assert secret not in repr(token) and token.hash not in repr(token)
    assert all(secret not in str(vars_of(kept)) for kept in tokens.rows.all())
    assert all(secret.encode() not in file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())


def vars_of(token):
    return {name: getattr(token, name) for name in token.__slots__}


def test_a_token_ends_when_it_expires_to_the_second(tokens, time):
    _, text = tokens.create("anne", Role.VIEWER, timedelta(hours=1))
    time.s = 3599
    assert tokens.caller(text) is not None
    time.s = 3600
    assert tokens.caller(text) is None
    assert not tokens.any_live()


def test_a_revoked_token_opens_nothing_from_then_on_and_its_name_is_free(tokens, time):
    token, text = tokens.create("anne", Role.VIEWER)
    with pytest.raises(SpecError, match="there is already a token 'anne'"):
        tokens.create("anne", Role.ADMIN)
    assert tokens.revoke("anne").id == token.id
    assert tokens.caller(text) is None
    time.s = 1
    _, second = tokens.create("anne", Role.ADMIN)
    assert tokens.caller(second) == Caller("anne", Role.ADMIN) and tokens.caller(text) is None
    assert [kept.revoked_at is None for kept in tokens.rows.all()] == [False, True]


def test_tokens_are_told_by_the_time_they_were_made_and_of_one_instant_by_id(tokens, time):
    first = [tokens.create(f"t{n}", Role.VIEWER)[0].id for n in range(4)]
    time.s = -10
    before = tokens.create("before", Role.VIEWER)[0].id
    assert [kept.id for kept in tokens.rows.all()] == [before, *sorted(first)]


def test_a_token_is_revoked_by_its_id_also_twice_and_who_is_unknown_is_told_the_names(tokens, time):
    token, _ = tokens.create("anne", Role.VIEWER)
    first = tokens.revoke(token.id).revoked_at
    time.s = 10
    assert tokens.revoke(token.id).revoked_at == first == tokens.rows.all()[0].revoked_at
    tokens.create("bert", Role.VIEWER)
    with pytest.raises(SpecError, match="no token 'anna'; there are: bert"):
        tokens.revoke("anna")


def test_what_another_process_revokes_is_noticed_within_a_second(tokens, rows, time):
    token, text = tokens.create("anne", Role.VIEWER)
    assert tokens.caller(text) is not None
    rows.revoke(token.id, time.date())
    time.s = RELOAD_S
    assert tokens.caller(text) is None


def test_the_last_use_is_noted_but_not_at_every_request(tokens, rows, time):
    _, text = tokens.create("anne", Role.VIEWER)
    assert rows.all()[0].last_used_at is None
    for s in (5.0, 5.5, NOTE_USE_S + 4):
        time.s = s
        tokens.caller(text)
    assert rows.all()[0].last_used_at == START + timedelta(seconds=5)
    time.s = NOTE_USE_S + 5
    tokens.caller(text)
    assert rows.all()[0].last_used_at == time.date()


def test_a_right_token_is_let_in_where_its_use_cannot_be_noted(time):
    class Full(MemoryTokenRows):
        def used(self, token_id, now):
            raise Unavailable("the disk is full")

    tokens = Tokens(Full(), time.date, time.now)
    _, text = tokens.create("anne", Role.VIEWER)
    assert tokens.caller(text) is not None


def test_wrong_tokens_ask_the_database_nothing(time):
    asked = []

    class Counting(MemoryTokenRows):
        def all(self):
            asked.append(1)
            return super().all()

    tokens = Tokens(Counting(), time.date, time.now)
    for number in range(100):
        assert tokens.caller(f"mlr_{number:016x}_{'0' * 64}") is None
    assert len(asked) == 1


def test_unknown_wrong_and_right_tokens_are_each_compared_once_in_constant_time(tokens, monkeypatch):
    _, text = tokens.create("anne", Role.VIEWER)
    compared, hashes = [], []
    compare, hashed = hmac.compare_digest, module.hashed
    monkeypatch.setattr(module.hmac, "compare_digest", lambda a, b: compared.append((a, b)) or compare(a, b))
    monkeypatch.setattr(module, "hashed", lambda *given: hashes.append(given) or hashed(*given))
    for number, token in enumerate((text, text[:-4] + "0000", f"mlr_{'0' * 16}_{'0' * 64}", "nonsense"), 1):
        tokens.caller(token)
        assert len(compared) == len(hashes) == number
    assert {len(a) == len(b) == 64 for a, b in compared} == {True}


@pytest.mark.parametrize("name", ["", "a b", "../x", "anonymous", "service", "x" * 65, "a\nb", "ä"])
def test_a_name_that_would_mislead_in_a_log_is_refused(name):
    with pytest.raises(SpecError, match="not a token's name"):
        new_token(name, Role.VIEWER, START)


def test_a_token_that_is_born_dead_is_refused():
    with pytest.raises(SpecError, match="expired already"):
        new_token("anne", Role.VIEWER, START, timedelta(0))


def test_a_token_cannot_outlive_the_calendar():
    token, _ = new_token("anne", Role.VIEWER, START, datetime.max.replace(tzinfo=UTC) - START)
    assert token.expires_at == datetime.max.replace(tzinfo=UTC)
    with pytest.raises(SpecError, match="expires: is after the year 9999"):
        new_token("anne", Role.VIEWER, START, timedelta(days=9_999_999))


def test_there_are_no_more_tokens_than_the_bound():
    with pytest.raises(SpecError, match="revoke one first"):
        check_room("anne", [f"t{number}" for number in range(MAX_TOKENS)])


def test_a_given_token_is_stored_once_and_stays_revoked(tokens, time):
    text = "mlr_" + "0a" * 8 + "_" + "1b" * 32
    made = tokens.add(text, "admin", Role.ADMIN)
    assert tokens.caller(text) == Caller("admin", Role.ADMIN)
    assert tokens.add(text, "admin", Role.ADMIN).id == made.id, "as when a pod starts again"
    assert len(tokens.rows.all()) == 1
    for other, name, role in ((text[:-1] + "c", "admin", Role.ADMIN), (text, "ann", Role.ADMIN)):
        with pytest.raises(SpecError, match="^token: 0a0a0a0a0a0a0a0a is another token, 'admin', admin"):
            tokens.add(other, name, role)
    with pytest.raises(SpecError, match="^token: is no token: mlr_"):
        tokens.add("mlr_secret", "admin", Role.ADMIN)
    tokens.revoke("admin")
    assert tokens.add(text, "admin", Role.ADMIN).revoked_at is not None
    assert tokens.caller(text) is None, "a revoked token is not made anew"


def test_a_given_token_takes_the_place_of_a_live_one_of_its_name(tokens, time):
    """A rotated Secret whose old token nobody revoked: its pod starts, and the old token is worth nothing."""
    old, new = (f"mlr_{each * 8}_{each * 32}" for each in ("0a", "1b"))
    tokens.add(old, "admin", Role.ADMIN)
    _, other = tokens.create("ann", Role.VIEWER)
    time.s = 5.0
    tokens.add(new, "admin", Role.ADMIN)
    assert tokens.caller(new) == Caller("admin", Role.ADMIN) and tokens.caller(other) is not None
    assert tokens.caller(old) is None
    revoked = {token.id: token.revoked_at for token in tokens.rows.all() if token.name == "admin"}
    assert revoked == {"0a" * 8: START + timedelta(seconds=5), "1b" * 8: None}
    assert tokens.add(old, "admin", Role.ADMIN).revoked_at is not None and tokens.caller(new) is not None
    with pytest.raises(SpecError, match="there is already a token 'admin'"):
        tokens.create("admin", Role.ADMIN)
