"""Pure: what the planner does next, independent of its driver.

`PlannerCore` returns effects to carry out and takes the answer to the last one. The live loop answers from the backend, the
metrics and the ledger; the simulator from virtual ones. Nothing here imports a clock, randomness, a socket, asyncio or a
client; import-linter checks it.
"""
