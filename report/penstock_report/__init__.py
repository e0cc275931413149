"""Penstock report."""
