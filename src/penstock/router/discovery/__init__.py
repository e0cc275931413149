"""Finds the workers (statefile, EndpointSlices or a fixed list), and checks their health and metrics."""
