"""Penstock router."""
