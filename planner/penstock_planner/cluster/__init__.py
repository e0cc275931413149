"""Planner for Kubernetes: one process plans every graph of a namespace, or of the cluster, while it holds the leader Lease.

`watch` keeps copies of graphs, ScalingAdapters and pods. `fleet` runs one loop per graph that has a planner. `status` reports each
planner's state to users. Needs the extra ``penstock[kubernetes]``.
"""
