"""`penstock doctor`: looks at a cluster and says what is wrong and what to do about it.

`gather` reads (all I/O, nothing is written); `judge` and its parts turn what was read into findings and are pure.
"""
