"""python -m faults NAME [options]: one run, one line with its figures, and an exit code.

The commands are in the module `commands` of each subject's folder: add one there.
"""

from __future__ import annotations

import argparse
import random
import sys
from importlib import import_module

from faults.command import COMMANDS

_SUBJECTS = ("log", "operations", "queue", "worker", "spark", "lake", "server", "webhook", "correctness")


def main() -> int:
    for subject in _SUBJECTS:
        import_module(f"faults.{subject}.commands")
    parser = argparse.ArgumentParser(
        prog="python -m faults", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = parser.add_subparsers(required=True, metavar="NAME")
    for name, command in COMMANDS.items():
        made = kinds.add_parser(name, help=command.about, description=command.about)
        made.set_defaults(run=command.run)
        made.add_argument("--pg", type=int, default=18, help="PostgreSQL's major version")
        made.add_argument(
            "--seed", type=int, default=random.randrange(1 << 30), help="of all chance in the run"
        )
        for option in command.options:
            made.add_argument(option.name, **option.settings)
    arguments = parser.parse_args()
    held: bool = arguments.run(arguments)
    if not held:
        print(f"seed {arguments.seed}", file=sys.stderr)
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
