"""Situations that any autoscaler of prefill and decode meets, and what it must and must not do in each.

`scenarios` says what happens and what is expected, `plant` is the fleet and its load as a fluid, `run` puts a
policy of the registry into it. `bench/planner/conformance.py` prints the table; tests hold the planner's own modes
to it.
"""
