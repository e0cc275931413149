"""`penstock doctor`: looks at a cluster and says what is wrong and what to do about it.

`gather` reads (all I/O, nothing is written); `check` and its parts turn what was read into findings and are pure.
"""
