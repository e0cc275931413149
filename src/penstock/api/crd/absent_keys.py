"""Rules in CEL for objects that hold only what was written.

The rows of `penstock.api.rule` read keys as if their defaults were stored. Here each read of a key becomes one that
finds the model's default where the key, or a section above it, is absent. Pure.
"""

from __future__ import annotations

import re
from typing import Final

from pydantic_core import PydanticUndefined

from penstock.api.base import SpecModel
from penstock.api.fields import keys_of, model_at
from penstock.api.rule import literal

_INDEX: Final = r"\[(?:[^\[\]]|\[[^\[\]]*\])*\]"
_READ: Final = re.compile(
    rf"(?P<text>'(?:\\'|[^'])*')|(?P<has>\bhas\()?\bself(?P<path>(?:\.\w+(?:{_INDEX})?)+)(?P<call>\()?"
)
"""Text, which stays as it is; or a path below ``self``, perhaps within ``has``, perhaps ending in a function's name."""
_STEP: Final = re.compile(rf"\.(\w+)({_INDEX})?")

_STORED: Final = frozenset(
    {
        ("GraphSpec", "operatorClass"),
        ("GraphSpec", "planner"),
        ("GraphSpec", "runtime"),
        ("PlannerConfig", "maxGpuBudget"),
        ("ScalingAdapterSpec", "replicas"),
    }
)
"""Defaults that the API server writes into objects. A rule that compares two versions of a key sees none that is absent;
null has a meaning of its own, which CEL cannot tell from absence; and /scale needs a number."""


def is_stored(model: str, key: str) -> bool:
    """Return whether the API server writes the default of a model's key into objects."""
    return (model, key) in _STORED


def with_absent_keys(cel: str, model: type[SpecModel]) -> str:
    """Return CEL that means for an object as written what ``cel`` means for one with every default."""

    def read(found: re.Match[str]) -> str:
        if found["text"]:
            return found["text"]
        steps = list(_STEP.finditer(found["path"]))
        method = steps.pop()[0] if found["call"] else ""
        present, default = _presence(steps, model)
        path = "self" + "".join(step[0] for step in steps)
        if found["has"]:  # its closing bracket follows
            return f"({' && '.join(dict.fromkeys((*present, f'has({path})')))}"
        if default is None or not present:
            return f"{path}{method}{found['call'] or ''}"
        return f"({' && '.join(present)} ? {path} : {default}){method}{found['call'] or ''}"

    return _READ.sub(read, cel)


def _presence(steps: list[re.Match[str]], model: type[SpecModel]) -> tuple[list[str], str | None]:
    """Return what must be there for a path to be read, and its key's default as CEL; None: it has none to compare."""
    present: list[str] = []
    at: type[SpecModel] | None = model
    default: str | None = None
    path = "self"
    for step in steps:
        if at is None:
            return present, None
        info = keys_of(at)[step[1]]
        path = f"{path}.{step[1]}"
        value = info.default
        default = None
        if value is not PydanticUndefined and not is_stored(at.__name__, step[1]):
            present.append(f"has({path})")
            if value is not None and not isinstance(value, SpecModel | tuple | dict):
                default = literal(value, info.annotation)
        path += step[2] or ""
        at = model_at(at, (step[1], "k") if step[2] else (step[1],))
    return present, default
