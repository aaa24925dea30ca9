"""Webhooks: events posted to HTTP endpoints. Needs the extra `pgmb[webhooks]`.

The path of one event through the modules:

1. `dispatcher` asks `store` for leased events.
2. `tracker` keeps each lease (`leases`) and puts its events into the endpoints' `lanes`.
3. `sender` takes deliveries from a lane; `request` builds the request, signed with `secrets`.
4. `client` posts it, over addresses that `egress` permits.
5. `outcomes` judges the response; `tracker` reports it to `store`, which settles the lease.

Nothing is imported here: importing the package does not require the extra.
"""
