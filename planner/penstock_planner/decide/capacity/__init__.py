"""What the workers of a graph can do: throughput, KV usage, latency, and how far demand may fill them.

`worker_model` is the protocol that the rules read. `observed` learns it from what the workers did. `profiled` reads it
from a performance profile, multiplied by the learned `corrections`, and limits waits with the formulas of `queueing`.
`decoding` says how full the KV caches would be with another number of workers.
"""
