"""Faults of queues: random operations beside a model, order, limits, filters."""
