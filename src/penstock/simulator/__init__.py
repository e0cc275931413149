"""Simulates a Penstock graph in virtual time. The same scenario and seed give byte-identical results.

docs/simulate.md lists the modelled behaviour.
"""
