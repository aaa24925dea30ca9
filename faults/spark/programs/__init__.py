"""Driver programs of the fault runs, each a process of its own."""
