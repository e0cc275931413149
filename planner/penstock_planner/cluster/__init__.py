"""One process plans every graph of a namespace, or of the cluster, while it holds the Lease.

`watch` keeps copies of graphs, adapters and pods; `fleet` runs one loop per graph that wants a planner;
`status` shows users what it does. Needs the extra ``penstock[kubernetes]``.
"""
