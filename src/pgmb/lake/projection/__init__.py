"""Projections: tables with typed columns, made of the payloads of a stream's archived events.

plan → write → commit → record, as the archiver does. The number of the last segment is the version of the
commit, so each archived event is projected once. A projection follows the lake: if files of the lake were
replaced since, by an erasure for example, the rows of their events are made again. docs/adr/0037 explains it.
"""
