"""Penstock in virtual time: same scenario and seed, same result, byte for byte; docs/simulate.md says what is modelled."""
