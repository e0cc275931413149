"""GPU pools on Kubernetes: `driver` observes each pool, distributes its GPUs and writes its status; graphs act on the grants.

`observe`, `capacity`, `share_out`, `status`, `grant` and `keys` are pure; `watch` and `readings` read from the API
server. The allocator itself is `penstock.gpu_pool`, which the local and the simulated pool also use.
"""
