"""Penstock workload."""
