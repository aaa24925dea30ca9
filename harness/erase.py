"""An erasure that is killed at a step.

    python -m harness.erase DSN --die-after STEP KEY ...

erases the keys in all streams, and kills itself with SIGKILL after the step. STEPS lists them.
"""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any
from unittest import mock

from pgmb.erasure import Eraser
from pgmb.lake.erase import LakeEraser

STEPS = (
    *("start", "close", "first segment", "erase_log", "scan", "digest", "write", "commit", "record"),
    *("vacuum", "erase_lake", "erase_waiting", "first rewrite", "rewrite"),
)
"""After which it can die. Where a step comes several times, after the first."""


def erase_and_die(dsn: str, keys: Sequence[str], after: str, die: Callable[[], None]) -> None:
    """Erase keys in all streams, and die after a step."""

    def reach(step: str) -> None:
        if step == after:
            die()

    def mortal(work: Callable[..., Any], step: str) -> Callable[..., Any]:
        def done(*given: Any, **named: Any) -> Any:
            result = work(*given, **named)
            reach(step)
            return result

        return done

    def told(said: str) -> None:
        if ": segment " in said:
            reach("first segment")
        elif said.startswith("rewritten: "):
            reach("first rewrite")

    with ExitStack() as patched:
        if not after.startswith("first "):
            of: type[Any] = Eraser if hasattr(Eraser, after) else LakeEraser
            patched.enter_context(mock.patch.object(of, after, mortal(getattr(of, after), after)))
        Eraser(dsn, keys, told=told).erase("killed")


def main() -> None:
    parser = argparse.ArgumentParser(description="Erase keys, and be killed.")
    parser.add_argument("dsn")
    parser.add_argument("--die-after", choices=STEPS, required=True)
    parser.add_argument("keys", nargs="+")
    asked = parser.parse_args()
    erase_and_die(asked.dsn, asked.keys, asked.die_after, lambda: os.kill(os.getpid(), signal.SIGKILL))


if __name__ == "__main__":
    main()
