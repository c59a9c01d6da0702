"""A sealed text is read with one key only."""

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.identity.sealed import SealKey, seal


@given(st.text(max_size=200))
def test_the_holder_of_the_key_reads_the_text(text):
    key = SealKey()
    assert key.unseal(seal(text, key.public)) == text


def test_nobody_else_does_and_the_text_is_not_in_it():
    key = SealKey()
    sealed = seal("a token", key.public)
    assert b"a token" not in base64.b64decode(sealed) and sealed != seal("a token", key.public)
    with pytest.raises(ValueError, match="sealed for another key"):
        SealKey().unseal(sealed)
    changed = bytearray(base64.b64decode(sealed))
    changed[-1] ^= 1
    with pytest.raises(ValueError, match="or changed on its way"):
        key.unseal(base64.b64encode(changed).decode())
