"""Penstock in virtual time: the engine core, the router's policies and the planner's rules, on any trace.

Same scenario and seed, same result, byte for byte. Nothing in here reads a clock except the command line's
progress bar; docs/simulate.md says what is modelled and what is not.
"""
