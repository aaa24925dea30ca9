"""Writing: rows as events (`columns`, `rows_as_json`), written by tasks (`task`), published by the driver
(`writers`)."""
