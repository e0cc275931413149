"""Measures what engines do: TTFT over prompt lengths, ITL over requests in flight; the body of `penstock profile`.

`points` and `plan` are pure; `measure` speaks to an OpenAI server, `workers` starts and stops
processes, `journal` and `files` read and write. What the figures mean is `penstock.performance`'s.
"""
