"""Where metrics come from: the router, the workers themselves, Prometheus, and a chain of them."""
