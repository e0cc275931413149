"""The router as a state machine without I/O: events and the time go in, effects come out.

`router.RouterCore` is driven by `penstock.router.admission` on an event loop and by the simulator in virtual time.
Nothing here imports a clock, randomness, a socket or an event loop.
"""
