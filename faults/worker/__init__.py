"""Faults of workers: kills, poison, handlers that fail."""
