"""Penstock graph."""
