"""What a newcomer runs into: a module that fails, an event that nobody gets. No traceback, and what to do."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import pgmb

if TYPE_CHECKING:
    from tests.cli.conftest import OpenTerminal, Run

# What the commands ask of the server is tested on every major, elsewhere.
pytestmark = pytest.mark.once(15)

HANDLER = "import pgmb\napp = pgmb.App()\n@app.on({})\ndef f({}): ...\n"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A directory to write modules into; what they leave in the interpreter is removed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("source", "told", "line"),
    [
        ('raise RuntimeError("boom")\n', "RuntimeError: boom", 1),
        ("\nimport nosuchthing\n", "ModuleNotFoundError: No module named 'nosuchthing'", 2),
        ("x = 1\ny = 1 +\n", "SyntaxError: invalid syntax", 2),
        ("import newcomer_second\n", "ValueError: second", 3),
        (HANDLER.format('"a"', "x, y"), "a handler is called with one argument", 3),
        (HANDLER.format("", "x"), "a handler needs at least one pattern", 3),
    ],
)
def test_a_module_that_fails_is_named_with_its_line(
    source: str, told: str, line: int, here: Path, run: Run
) -> None:
    (here / "newcomer_first.py").write_text(source)
    (here / "newcomer_second.py").write_text('\n\nraise ValueError("second")\n')
    outcome = run("work", "newcomer_first:app")
    assert outcome.code == 2
    assert told in outcome.err
    assert f"line {line})" in outcome.err
    assert str(here) in outcome.err
    assert "Traceback" not in outcome.err


@pytest.mark.parametrize("target", ["", ":", "..:app", "newcomer_first.py", "newcomer first:app"])
def test_what_is_no_module_is_told_with_an_example(target: str, here: Path, run: Run) -> None:
    outcome = run("work", target)
    assert outcome.code == 2
    assert ":app" in outcome.err
    assert "Traceback" not in outcome.err


def test_publish_says_in_a_terminal_that_no_queue_gets_it(dsn: str, terminal: OpenTerminal) -> None:
    with terminal("publish", "order.paid", "1") as shown:
        shown.finish()
        assert "No queue that you can see receives order.paid" in shown.text
    with pgmb.connect(dsn) as broker:
        broker.create_queue("billing", ["order.*"])
    with terminal("publish", "order.paid", "1") as shown:
        shown.finish()
        assert "No queue" not in shown.text


def test_publish_says_nothing_of_it_to_a_program(run: Run) -> None:
    outcome = run("publish", "order.paid", "1")
    assert (outcome.code, outcome.err) == (0, "")


def test_dlq_show_lays_the_payload_out_in_lines(dsn: str, run: Run) -> None:
    with pgmb.connect(dsn) as broker:
        broker.create_queue("billing")
        broker.publish("order.paid", {"number": 1, "note": "two\nlines"})
        broker.receive("billing").bury(error="first\nsecond \x1b[31m")
        (letter,) = broker.dead_letters("billing")
    shown = run("dlq", "show", "billing", str(letter.id)).out
    assert '"number": 1,' in shown
    assert r"{\n" not in shown
    assert r'"note": "two\nlines"' in shown
    # Lines are all that a text may bring along.
    assert "\x1b" not in shown
