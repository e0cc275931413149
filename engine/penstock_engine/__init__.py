"""Penstock engine."""
