"""Words that every part of Penstock shares: errors, time, metric names, the Prometheus text parser.

No I/O. Nothing here imports another Penstock package.
"""
