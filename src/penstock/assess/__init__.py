"""Assesses what Penstock would save: reads a Prometheus, makes the load again, simulates fleets, recommends one."""
