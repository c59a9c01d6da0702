"""`headrace token`: create, list and revoke; a token is shown once."""

import json

import pytest
from typer.testing import CliRunner

from headrace.service.auth.roles import Caller, Role
from headrace.service.auth.token_store import StoredTokens
from headrace.service.auth.tokens import Tokens
from headrace.service.cli.main import cli
from headrace.service.records.database import opened


@pytest.fixture
def headrace(tmp_path):
    config = tmp_path / "service.toml"
    config.write_text('root = "kept"\n')

    def run(*words):
        return CliRunner().invoke(cli, ["token", *words, "--config", str(config)])

    return run


def holder(tmp_path, text):
    with opened(f"sqlite:///{tmp_path / 'kept' / 'records.db'}") as records:
        return Tokens(StoredTokens(records)).caller(text)


def test_a_token_is_printed_alone_and_opens_the_service_until_it_is_revoked(headrace, tmp_path):
    made = headrace("create", "anne", "--role", "operator")
    assert made.exit_code == 0 and made.stdout.count("\n") == 1
    text = made.stdout.strip()
    assert holder(tmp_path, text) == Caller("anne", Role.OPERATOR)
    assert "live     operator  anne, created 20" in headrace("list").stdout
    assert headrace("revoke", "anne").exit_code == 0
    assert holder(tmp_path, text) is None
    assert "revoked" in headrace("list").stdout


def test_a_token_of_a_file_takes_the_place_of_the_one_of_its_name(headrace, tmp_path):
    """As each start of a pod gives those of its Secret, also after that was rotated."""
    file = tmp_path / "admin"
    old, new = (f"mlr_{each * 8}_{each * 32}" for each in ("0a", "1b"))
    for text in (old, old, new, new):
        file.write_text(f"{text}\n")
        assert headrace("create", "admin", "--role", "admin", "--token-file", str(file)).exit_code == 0
    assert holder(tmp_path, new) == Caller("admin", Role.ADMIN) and holder(tmp_path, old) is None


def test_the_list_has_nothing_that_opens(headrace, tmp_path):
    text = headrace("create", "anne", "--role", "viewer", "--expires", "30d").stdout.strip()
    (listed,) = json.loads(headrace("list", "--json").stdout)
    assert listed["name"] == "anne" and listed["role"] == "viewer" and listed["state"] == "live"
    assert listed["expires_at"] is not None and listed["last_used_at"] is None
    assert not {"hash", "salt"} & set(listed)
    assert text.rpartition("_")[2] not in headrace("list").stdout


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("create", "anne", "--role", "viewer", "--expires", "soon"), "--expires: 'soon' is not of the form"),
        (("create", "anne", "--role", "viewer", "--expires", "0s"), "expired already"),
        (("create", "anne", "--role", "viewer", "--expires", "9" * 30 + "d"), "--expires"),
        (("create", "anne", "--role", "viewer", "--expires", "9999999d"), "expires: is after the year 9999"),
        (("create", "../x", "--role", "viewer"), "not a token's name"),
        (("revoke", "anne"), "there is no token 'anne'; there are: none"),
    ],
)
def test_what_is_wrong_is_told(headrace, words, told):
    assert told in str(headrace(*words).exception)


def test_without_tokens_it_says_how_to_make_one(headrace):
    assert "headrace token create" in headrace("list").stdout
