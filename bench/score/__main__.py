"""`python -m bench.score AREA|all [--full] [--pg MAJOR]`: exit code 1 if a figure falls short of its goal."""

from __future__ import annotations

import argparse
import sys
import time

from bench.score.card import fill
from bench.score.registry import AREAS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.score", description=__doc__)
    parser.add_argument("area", choices=[*AREAS, "all"])
    parser.add_argument("--full", action="store_true", help="complete runs instead of brief ones")
    parser.add_argument("--pg", type=int, default=18, help="the PostgreSQL major to measure on (18)")
    arguments = parser.parse_args()
    started = time.monotonic()
    ok = True
    for area in AREAS if arguments.area == "all" else [arguments.area]:
        print(f"== {area}")
        ok &= fill(AREAS[area], full=arguments.full, major=arguments.pg)
    print(f"took {time.monotonic() - started:.0f} s")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
