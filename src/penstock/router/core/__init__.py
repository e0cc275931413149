"""The router as a state machine without I/O, which the live router and the simulator drive. Pure."""
