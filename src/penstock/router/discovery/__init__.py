"""Which workers there are (statefile, EndpointSlices or a fixed list), and how they do (health and metrics)."""
