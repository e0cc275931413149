"""Pure: how many replicas of each role there should be, and why.

`pipeline.decide` turns one adjustment interval's pulls, the state and the configuration into a decision and
the next state. The loop, replay and `penstock planner decide` call the same function. Nothing here imports a
clock, randomness, a socket, asyncio or a client; import-linter checks it.
"""
