"""The scorecard: `python -m bench.score AREA`, one line for each thing that must be shown."""
