"""The terminal: confirmation, interruption and single keys."""

from __future__ import annotations

import select
import signal
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager

import typer

from pgmb.cli import output


def confirm(question: str, yes: bool) -> None:
    """Go on if the answer is yes; without a terminal, only with --yes."""
    if yes:
        return
    if not sys.stdin.isatty():
        output.fail(
            f"{question} Nobody can be asked: standard input is not a terminal.", "Add --yes.", code=2
        )
    typer.confirm(output.printable(question), abort=True, err=True)


@contextmanager
def interruptible() -> Generator[None]:
    """Being ended by Ctrl-C or SIGTERM cleans up, and is no error."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def keys() -> Generator[bool]:
    """Inside, keys arrive as they are pressed and are not shown. Gives whether there is a keyboard."""
    if sys.platform == "win32" or not sys.stdin.isatty():
        yield False
        return
    import termios
    import tty

    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    tty.setcbreak(terminal)
    try:
        yield True
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def pressed(seconds: float, keyboard: bool) -> str | None:
    """The next key, or None after that many seconds."""
    if not keyboard:
        time.sleep(seconds)
        return None
    ready, _, _ = select.select([sys.stdin], [], [], max(seconds, 0))
    if not ready:
        return None
    # An empty read: the terminal is gone.
    return sys.stdin.read(1) or "q"
