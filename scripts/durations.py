"""python -m scripts.durations FOLDER [FAILED...]: how long the gate took, by step and by its slowest tests.

FOLDER holds each step's output; standard input has lines `step=seconds`. Also writes build/gate.json, which
`make score-house` reads.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REPORT = ROOT / "build" / "gate.json"

_TEST = re.compile(r"^\s*(\d+\.\d+)s (?:call|setup|teardown)\s+(\S.*)$", re.MULTILINE)


def slowest(outputs: list[str], count: int = 10) -> list[tuple[float, str]]:
    """The slowest tests in what pytest printed with --durations, slowest first."""
    found = [(float(seconds), test) for output in outputs for seconds, test in _TEST.findall(output)]
    return sorted(found, reverse=True)[:count]


def steps_of(lines: str) -> dict[str, int]:
    pairs = (line.rpartition("=") for line in lines.splitlines() if line)
    return {name: int(seconds) for name, _, seconds in pairs}


def main() -> None:
    folder, failed = Path(sys.argv[1]), sys.argv[2:]
    steps = steps_of(sys.stdin.read())
    tests = slowest([path.read_text(errors="replace") for path in sorted(folder.iterdir())])
    for name, seconds in steps.items():
        print(f"{seconds:6d} s  {name}")
    print("slowest tests:")
    for duration, test in tests:
        print(f"{duration:8.1f} s  {test}")
    REPORT.parent.mkdir(exist_ok=True)
    report = {
        "commit": _commit(),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "steps": steps,
        "failed": failed,
        "slowest": tests,
    }
    REPORT.write_text(json.dumps(report, indent=2) + "\n")


def _commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, check=False, capture_output=True, text=True
    )
    return done.stdout.strip()


if __name__ == "__main__":
    main()
