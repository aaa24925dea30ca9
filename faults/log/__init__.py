"""Faults of the log: late commits, rotation, schedules."""
