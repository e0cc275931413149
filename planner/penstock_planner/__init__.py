"""The Penstock planner: scales the workers of a graph by demand, thresholds or latency targets."""
