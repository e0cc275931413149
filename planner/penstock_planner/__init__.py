"""Penstock planner."""
