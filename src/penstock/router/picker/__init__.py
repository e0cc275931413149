"""One picker for all routers of a graph: who it is, what the others ask it, and what they report to its successor."""
