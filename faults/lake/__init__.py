"""Faults of the lake: archivers that are killed, several of them, and files that are lost."""
