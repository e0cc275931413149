"""Pure: what differs, what may start, what must drain, and what the status says."""
