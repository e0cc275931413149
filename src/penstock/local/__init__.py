"""Local backend: a graph's router, workers and planner as processes of this machine, under a circus arbiter."""
