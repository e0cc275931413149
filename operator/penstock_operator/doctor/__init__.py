"""`penstock doctor`: inspects a cluster and reports what is wrong and what to do about it.

`gather` reads the cluster (all I/O; nothing is written). `check` and its parts turn the facts into findings and are
pure.
"""
