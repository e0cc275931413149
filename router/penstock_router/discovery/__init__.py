"""Which workers there are (statefile or a fixed list), and how they do (health and metrics)."""
