"""Measures what engines do: TTFT over prompt lengths, ITL over requests in flight; the body of `penstock profile`.

`points`, `window`, `candidates` and `graph_back` are pure; `measure` speaks to an OpenAI server, `workers` starts and stops
processes, `journal` and `files` read and write. What the figures mean is `penstock.performance`'s.
"""
