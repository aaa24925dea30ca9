"""Every attacker of the threat model has a file of attempts, and `make score-security` counts them all."""

from __future__ import annotations

import re

from tests.adversary.tally import ATTACKERS, TESTS

MODEL = TESTS.parent / "docs" / "explanation" / "security.md"
NOT_COUNTED = {"test_grant_fuzz.py", "test_tally.py"}


def test_every_attacker_has_a_file_and_every_file_is_counted() -> None:
    counted = [file for files in ATTACKERS.values() for file in files]
    assert [file for file in counted if not (TESTS / file).exists()] == []
    files = {file.name for file in (TESTS / "adversary").glob("test_*.py")} - NOT_COUNTED
    assert {file.removeprefix("adversary/") for file in counted if file.startswith("adversary/")} == files
    named = re.findall(r"^\| .* \| `(test_\w+\.py)` \|$", MODEL.read_text(), re.MULTILINE)
    assert set(named) == files
