"""The client. Written here for asyncio; `make sync` writes pgmb._sync from it."""
