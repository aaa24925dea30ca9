"""Crowds of readers of server-sent events."""
