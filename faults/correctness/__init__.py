"""Programs that count effects committed with their ack: the checker shares no code with the product."""
