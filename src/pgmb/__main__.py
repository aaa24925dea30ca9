"""The command `pgmb`, also as `python -m pgmb`."""

from __future__ import annotations

import sys


def main() -> None:
    try:
        # Takes long enough to be interrupted.
        from pgmb.cli import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
