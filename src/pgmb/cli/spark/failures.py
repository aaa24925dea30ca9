"""What Spark's errors come down to: the line that matters, out of two languages' tracebacks."""

from __future__ import annotations

import re
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from pgmb.cli import output

# The last line of a Python traceback, wherever in the text it stands: not indented, a class, what it says.
_RAISED = re.compile(
    r"Traceback \(most recent call last\):\n(?:[ \t].*\n|\n)*^(?P<kind>[\w.]+)(?:: (?P<said>.*))?$",
    re.MULTILINE,
)
_CLASS = re.compile(r"^\[[A-Z_.]+\] ")
_SQLSTATE = re.compile(r" SQLSTATE: \w{5}$")


@contextmanager
def explained(log: Path) -> Generator[None]:
    """Errors of Spark and of what runs in it become a message and a hint."""
    from py4j.protocol import Py4JError  # type: ignore[import-untyped] # pyright: ignore[reportMissingTypeStubs]
    from pyspark.errors import PySparkException

    try:
        yield
    except (PySparkException, Py4JError) as error:
        text = str(error)
        if "JAVA_GATEWAY_EXITED" in text:
            output.fail(
                _last_line(log) or "Java did not start", "Spark needs Java 17 or later: set JAVA_HOME."
            )
        output.fail(*said(text))


def said(text: str) -> tuple[str, str | None]:
    """The message, and the hint if there is one."""
    raised = list(_RAISED.finditer(text))
    if raised:
        message, hint = raised[-1]["said"] or raised[-1]["kind"], None
        rest = text[raised[-1].end() :].lstrip("\n").splitlines()
        if rest and rest[0].startswith("Hint: "):
            hint = rest[0].removeprefix("Hint: ")
        return message, hint
    first = next((line for line in text.splitlines() if line.strip()), "Spark failed")
    return _SQLSTATE.sub("", _CLASS.sub("", first)), None


def _last_line(log: Path) -> str | None:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else None
