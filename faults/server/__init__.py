"""Faults of the HTTP server: hostile requests, readers of server-sent events."""
