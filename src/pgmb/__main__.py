"""`python -m pgmb` is the command `pgmb`."""

from __future__ import annotations

from pgmb.cli import main

main()
