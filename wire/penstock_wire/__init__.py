"""Penstock wire."""
