"""Single keys from the terminal, without Enter; where there is no terminal, only time passes."""

from __future__ import annotations

import select
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager


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
    """The next key, or None after so many seconds."""
    if not keyboard:
        time.sleep(seconds)
        return None
    ready, _, _ = select.select([sys.stdin], [], [], max(seconds, 0))
    if not ready:
        return None
    # An empty read: the terminal is gone, and with it whoever watched.
    return sys.stdin.read(1) or "q"
