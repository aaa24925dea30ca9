"""Faults of Spark's source and sink."""
