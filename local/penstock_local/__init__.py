"""Penstock local."""
