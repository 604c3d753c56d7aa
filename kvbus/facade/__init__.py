"""REST for clients that have no stream: a stateless way onto the bus and back. `kvbus serve` runs it."""
