"""Sources of metrics: the router, the workers themselves, Prometheus, and a chain of these."""
