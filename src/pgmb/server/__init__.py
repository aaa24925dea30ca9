"""The HTTP side, one ASGI application: server-sent events, REST, operations, the dashboard.

Needs the extra `server`. The data's way: access.py says who asks, limits.py how much; a part answers.
"""
