"""Which workloads and seeds may be looked at while a policy is made: a rule, so that no choice follows a result.

A new workload gets its side by the hash of its name, before anything ran on it.
"""

from __future__ import annotations

from hashlib import sha256

LOOKED_AT = frozenset(
    (
        "poisson",
        "sine",
        "long-short",
        "flash",
        "bursts",
        "mooncake",
        "aggregated-sine",
        "regimes",
        "tenants",
        "days",
    )
)
"""Policies were made on these, before there was a rule or against it."""


def is_tuned(name: str) -> bool:
    """Tell whether a workload may be looked at; all others are held out."""
    return name in LOOKED_AT or _first_byte(name) % 2 == 0


def is_tuned_seed(name: str, seed: int) -> bool:
    """Tell whether a seed of a tuned workload may be looked at: of two successive ones, the one that the hash says."""
    return is_tuned(name) and (seed + _first_byte(f"{name} seeds")) % 2 == 0


def _first_byte(text: str) -> int:
    return sha256(text.encode()).digest()[0]
