"""`python -m bench [ROW ...] [--brief|--quick|--full] [--pg MAJOR] [--json FILE] [--markdown FILE]`."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from bench.forms import FORMS
from bench.ground import Ground
from bench.outcome import Outcome
from bench.report import markdown, table, write_json
from bench.rows import ROWS


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"of {', '.join(ROWS)}; all unless given")
    for name in FORMS:
        parser.add_argument(f"--{name}", dest="form", action="store_const", const=name, default="quick")
    parser.add_argument("--pg", type=int, default=18, help="the PostgreSQL major (18)")
    parser.add_argument("--json", type=Path, help="write every round and the machine's facts here")
    parser.add_argument("--markdown", type=Path, help="write the table of figures and goals here")
    arguments = parser.parse_args()
    if unknown := set(arguments.rows) - set(ROWS):
        parser.error(f"no such row: {', '.join(sorted(unknown))}")
    form = FORMS[arguments.form]
    outcomes: list[Outcome] = []
    with Ground(arguments.pg) as ground:
        for name in arguments.rows or ROWS:
            started = time.monotonic()
            outcomes.append(ROWS[name](ground, form))
            print(f"{table(outcomes[-1])}\n  took {time.monotonic() - started:.0f} s\n", flush=True)
    if arguments.markdown is not None:
        arguments.markdown.write_text(markdown(outcomes))
    if arguments.json is not None:
        write_json(arguments.json, outcomes, form, arguments.pg)


if __name__ == "__main__":
    main()
