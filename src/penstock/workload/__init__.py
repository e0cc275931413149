"""Workload: traces, arrivals, prompts, and the client that replays them against a live server.

Called by the command line and, for its results, by the report. Knows nothing of the router, the
engine or the planner: it speaks HTTP only. `arrivals`, `prompts`, `synthetic` and `statistics`
are pure.
"""
