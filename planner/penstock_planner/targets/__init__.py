"""Targets: the interface that a backend implements for the planner, and its implementation for Kubernetes."""
