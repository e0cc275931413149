"""Whether the model of a graph lies where its manifest says; local workers read it from this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from penstock.api import GraphSpec
from penstock.core.errors import InvalidSpecError, Problem

_MAKE = "`penstock make-model` makes a small one (docs/vllm.md)"


def check_model(spec: GraphSpec) -> None:
    """Refuse a model that is written as a path and is no folder: its workers would end at their start.

    Raises:
        InvalidSpecError: it is not there; the message says how to make one.
    """
    name = spec.model.name
    if _is_absent(spec) and name.startswith(("/", "./", "../")):
        raise InvalidSpecError(
            [Problem(path="spec.model.name", message=f"{name} is no folder here; {_MAKE}")]
        )


def model_warnings(spec: GraphSpec) -> Iterator[Problem]:
    """Tell of a model that may be meant as a folder: few ids on Hugging Face have no slash."""
    name = spec.model.name
    if _is_absent(spec) and "/" not in name:
        message = f"{name} is no folder here, so workers will look for it on Hugging Face; {_MAKE}"
        yield Problem(path="spec.model.name", message=message)


def _is_absent(spec: GraphSpec) -> bool:
    return not spec.traits.is_simulated and not Path(spec.model.name).is_dir()
