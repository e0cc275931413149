"""Pure: what the planner does next, independent of its driver.

`PlannerCore.step` takes one event and returns the next state and the effects to carry out. The live loop feeds it
the backend, the metrics and the ledger; the simulator feeds it virtual ones. Nothing here imports a clock,
randomness, a socket, asyncio or a client; import-linter checks it.
"""
