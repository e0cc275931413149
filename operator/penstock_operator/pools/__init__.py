"""GPU pools on Kubernetes: `driver` observes each pool, allocates its GPUs to graphs and writes its status.

Terms: a graph's *bid* is the list of GPUs that its desired worker replicas need. Its *grant* is the number of GPUs
that its workers can occupy. Each change of a grant has a new *serial*, which the graph acknowledges when it has
reconciled under that grant. Its *share* is the allocator's state about the graph, stored in the pool's status.

`observe`, `capacity`, `share_out`, `status`, `grant` and `keys` are pure; `watch` and `readings` read from the API
server. The allocator itself is `penstock.gpu_pool`, which the local and the simulated pool also use.
"""
