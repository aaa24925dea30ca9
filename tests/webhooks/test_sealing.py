"""Sealed secrets open with their key and for their endpoint only, and no error shows either."""

from __future__ import annotations

import base64
import traceback
from pathlib import Path
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgmb.errors import SecretKeyMissing, SecretUnreadable
from pgmb.webhooks.secrets import SealingKey, generate_key

pytestmark = pytest.mark.once


@given(text=st.text())
def test_what_is_sealed_opens_to_the_letter(text: str) -> None:
    key, endpoint = SealingKey.parse(generate_key()), uuid4()
    sealed = key.seal(text, endpoint)
    assert key.open(sealed, endpoint) == text
    assert len(sealed) == len(text.encode()) + 33
    assert key.seal(text, endpoint) != sealed


def test_keys_are_replaced_one_after_another() -> None:
    old, new = generate_key(), generate_key()
    endpoint = uuid4()
    before = SealingKey.parse(old).seal("whsec_x", endpoint)
    both = SealingKey.parse(f"{new} {old}\n")
    assert both.open(before, endpoint) == "whsec_x"
    assert not both.sealed_by_the_first(before)
    after = both.seal("whsec_x", endpoint)
    assert both.sealed_by_the_first(after)
    assert SealingKey.parse(new).open(after, endpoint) == "whsec_x"


def test_the_wrong_key_is_named_and_not_shown() -> None:
    text, other, endpoint = generate_key(), generate_key(), uuid4()
    sealed = SealingKey.parse(text).seal("whsec_hidden", endpoint)
    with pytest.raises(SecretUnreadable) as caught:
        SealingKey.parse(other).open(sealed, endpoint)
    shown = "".join(traceback.format_exception(caught.value))
    assert SealingKey.parse(text).ids[0] in shown
    assert SealingKey.parse(other).ids[0] in shown
    assert "PGMB_SECRET_KEY" in (caught.value.hint or "")
    for hidden in (text, other, "whsec_hidden"):
        assert hidden not in shown
    assert text not in repr(SealingKey.parse(text))


def test_a_secret_belongs_to_its_endpoint() -> None:
    key, endpoint = SealingKey.parse(generate_key()), uuid4()
    with pytest.raises(SecretUnreadable, match="is not one of endpoint"):
        key.open(key.seal("whsec_x", endpoint), uuid4())


def test_every_changed_byte_is_noticed() -> None:
    key, endpoint = SealingKey.parse(generate_key()), uuid4()
    sealed = key.seal("whsec_x", endpoint)
    for place in range(len(sealed)):
        changed = bytearray(sealed)
        changed[place] ^= 1
        with pytest.raises(SecretUnreadable):
            key.open(bytes(changed), endpoint)
    for size in range(len(sealed)):
        with pytest.raises(SecretUnreadable):
            key.open(sealed[:size], endpoint)


def test_the_key_comes_from_the_environment_or_a_file(tmp_path: Path) -> None:
    text = generate_key()
    file = tmp_path / "key"
    file.write_text(text + "\n")
    expected = SealingKey.parse(text).ids
    assert SealingKey.from_environment({"PGMB_SECRET_KEY": text}).ids == expected
    assert SealingKey.from_environment({"PGMB_SECRET_KEY_FILE": str(file)}).ids == expected
    assert len(base64.b64decode(text)) == 32


def test_a_key_that_is_none_is_refused_without_being_shown(tmp_path: Path) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe" * 16)
    short = base64.b64encode(b"sixteen bytes ..").decode()
    for environment, hidden in [
        ({}, None),
        ({"PGMB_SECRET_KEY": " "}, None),
        ({"PGMB_SECRET_KEY": short}, short),
        ({"PGMB_SECRET_KEY": f"{generate_key()} hunter2!"}, "hunter2"),
        ({"PGMB_SECRET_KEY": generate_key(), "PGMB_SECRET_KEY_FILE": "x"}, None),
        ({"PGMB_SECRET_KEY_FILE": str(tmp_path / "missing")}, None),
        ({"PGMB_SECRET_KEY_FILE": str(binary)}, "\\xff"),
    ]:
        with pytest.raises(SecretKeyMissing) as caught:
            SealingKey.from_environment(environment)
        assert caught.value.hint
        assert caught.value.__suppress_context__ or caught.value.__context__ is None
        assert hidden is None or hidden not in "".join(traceback.format_exception(caught.value))
