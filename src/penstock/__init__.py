"""Penstock runs disaggregated LLM serving: operator, router, planner, simulator. One package a part.

For notebooks it offers `load_graph`, `load_trace`, `simulate` and `compare`, imported on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.cli.notebook import Comparison, compare, load_graph, load_trace, simulate

__all__ = ["Comparison", "compare", "load_graph", "load_trace", "simulate"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    return getattr(import_module("penstock.cli.notebook"), name)


def __dir__() -> list[str]:
    return __all__
