"""What the rows about Spark share."""
