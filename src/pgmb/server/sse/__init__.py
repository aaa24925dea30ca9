"""Server-sent events: a stream's tail over HTTP. A reader can resume on any process of any node.

The path of one event through the modules:

1. `tail` reads the events of a stream once for all its readers, with `history.StreamLog`.
2. `matching` finds the readers that asked for an event.
3. `frames` encodes it, with a `ResumeToken` as its id.
4. `connection` queues it for each reader and sends it.

`app` has the routes. A reader that returns with an id gets what it missed from `replay`.
"""

from pgmb.server.sse.app import Subscription, create_sse_app, routes

__all__ = ["Subscription", "create_sse_app", "routes"]
