"""The client without I/O: statements, encoding, and the decisions that both clients share."""
