"""GPU pools on Kubernetes: `driver` observes each pool, shares it out and writes its status; graphs act under the grants.

`observe`, `capacity`, `share_out`, `status`, `grant` and `keys` are pure; `watch` and `readings` bring what the API server shows.
The allocator itself is `penstock.gpu_pool`, which the local and the simulated pool run likewise.
"""
