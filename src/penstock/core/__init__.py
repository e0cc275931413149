"""Basics that all packages share: errors, clocks, metric names, the Prometheus text parser, and HTTP in `http`.

Imports no other Penstock package.
"""
