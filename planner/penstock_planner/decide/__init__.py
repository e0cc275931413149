"""Decide how many replicas each role needs, and why. Pure functions without I/O.

Where to look: `demand` holds what is observed and forecast, `capacity` what workers can do, `objective` what the past
would have cost, `policies` what each mode proposes, and `bounds` the rules that bind every proposal.

`pipeline.decide` takes the metrics of one adjustment interval, the planner's state and the configuration, and returns
a decision and the next state. The live loop, `penstock planner replay` and `penstock planner decide` call this same
function. Modules in this package import no clock, randomness, socket, asyncio or client; import-linter checks it.
"""
