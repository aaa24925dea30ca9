"""Programs that break things on purpose, and the checker of what is left: `python -m faults --help`."""
