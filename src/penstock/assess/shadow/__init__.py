"""Shadow mode: a planner that reads the Prometheus of a fleet which something else scales, and decides for a fleet of its own."""
