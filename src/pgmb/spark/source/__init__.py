"""Reading: positions and plans at the driver (`readers`, `shards`, `log`, `offsets`), parts at the executors
(`reading`, `statement`, `rows`)."""
