"""Fault programs of operations: what is shown to operators, and how services recover."""
