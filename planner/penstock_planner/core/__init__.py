"""The planner's control logic without I/O: what it does next, independent of the program that drives it.

`PlannerCore` returns effects, that is, actions that its driver has to carry out, and receives the answer to the last
one. The live loop answers from the backend, the metrics and the ledger; the simulator from simulated ones. Nothing here
imports a clock, randomness, a socket, asyncio or a client; import-linter checks it.
"""
