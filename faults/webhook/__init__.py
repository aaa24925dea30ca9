"""Faults of webhooks: dispatchers killed, endpoints that misbehave, limits."""
