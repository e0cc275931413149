"""Workload: traces, arrivals, prompts, and the client that replays them over HTTP against a live server."""
