"""Server-sent events: the log's tail over HTTP, resumed on any process of any node.

The data's way: log.py reads between ticks, tail.py does so once for all readers of a stream, index.py finds
those who ask for an event, reader.py holds what waits for one of them, serving.py sends it. Whoever comes
back with an id (mark.py) gets what it missed from recent.py or replay.py.
"""

from pgmb.server.sse.app import create_sse_app, routes
from pgmb.server.sse.serving import Subscription

__all__ = ["Subscription", "create_sse_app", "routes"]
