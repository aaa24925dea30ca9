"""Endpoints over HTTP: what is posted to them, how it is signed, where it may go, what came back.

It needs the extra `pgmb[webhooks]`. Nothing is imported here, so that a part costs only what it needs itself.
"""
