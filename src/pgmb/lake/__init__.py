"""The lake: history of streams in open tables, which pgmb writes, verifies and lets others read."""
