"""Basics that every part of Penstock shares: errors, clocks, metric names, the Prometheus text parser.

Mostly pure; imports no other Penstock package.
"""
