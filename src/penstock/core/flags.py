"""Settings that explain themselves: fields of a dataclass with help, bounds and spelling.

The command line is generated from them (`penstock.cli.fields`), and `check_bounds` holds them for callers in Python.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Final, Literal

from penstock.core.clock import SimulatedClock
from penstock.core.durations import EXAMPLES, seconds_of
from penstock.core.errors import ConfigError

_KEY: Final = "flag"

_BOUNDS: Final = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """How the command line takes a field.

    Attributes:
        name: Spelling; None: the field's name with hyphens.
        unset: What applies without a value, for the help.
        metavar: Stands for the value in the help; None: the type.
        convert: Makes the field's value from the flag's.
        form: How a value is written, with an example, where ``convert`` reads text.
        is_separated: One argument holds all values of a tuple, with commas between them; else the flag is repeated.
        bare: Value of the flag without one; None: it needs one.
        key_variable: Environment variable of a key, which is never an argument: the flag names its file.
    """

    help: str
    name: str | None = None
    unset: str | None = None
    metavar: str | None = None
    choices: tuple[str, ...] = ()
    path: Literal["file", "existing file", "folder"] | None = None
    convert: Callable[[Any], Any] | None = None
    form: str | None = None
    is_separated: bool = False
    bare: str | None = None
    short: tuple[str, ...] = ()
    variable: str | None = None
    key_variable: str | None = None
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None


def flag(text: str, *, default: Any = MISSING, **details: Any) -> Any:
    """Return a dataclass's field."""
    found = Flag(help=text, **details)
    if default is MISSING and found.unset is not None:
        default = None
    return field(default=default, repr=found.key_variable is None, metadata={_KEY: found})


def duration_flag(text: str, **details: Any) -> Any:
    """Return the field of a duration, in seconds, whose flag takes it with its unit."""
    form = f"a duration, such as {EXAMPLES}"
    return flag(text, convert=seconds_of, form=form, metavar="DURATION", **details)


def attainment_flag(text: str, **details: Any) -> Any:
    """Return the field of ``--attainment``."""
    return flag(text, name="--attainment", ge=0.5, lt=1, **details)


RENAMED_FLAGS: Final[Mapping[str, str]] = {
    "--slo-s": "write --ttft-slo with a unit, such as 5s",
    "--ttft": "write --ttft-slo with a unit, such as 500ms",
    "--ttft-target-s": "write --ttft-slo with a unit, such as 2s",
    "--itl-slo-s": "write --itl-slo with a unit, such as 50ms",
    "--itl": "write --itl-slo with a unit, such as 50ms",
    "--itl-target-s": "write --itl-slo with a unit, such as 50ms",
    "--objective-itl": "write --itl-slo with a unit, such as 50ms",
    "--in-time": "write --attainment, a fraction such as 0.99",
    "--qps": "write --rate, requests/s",
    "--counterfactual-cpu-s": "write --counterfactual-fleets, a number of fixed fleets such as 60",
}
"""What to write in place of a former flag."""


def time_scale(default: float = 1.0, *, more: str = "") -> Any:
    """Return the field of ``--speed``."""
    text = f"Time scale: simulated seconds per real second{more}."
    return flag(text, default=default, convert=lambda value: SimulatedClock(value).speed)


def flag_of(name: str) -> str:
    """Return ``--max-step`` for ``max_step``."""
    return f"--{name.replace('_', '-')}"


def flags(model: Any) -> dict[str, Flag]:
    """Return the flags of a dataclass's fields, by field; those without one are left out."""
    return {each.name: each.metadata[_KEY] for each in fields(model) if _KEY in each.metadata}


def check_bounds(settings: Any) -> None:
    """Refuse a number that its flag does not allow."""
    for name, each in flags(settings).items():
        given = getattr(settings, name)
        for value in given if isinstance(given, tuple) else (given,):
            if isinstance(value, (int, float)) and not isinstance(value, bool) and not is_within(each, value):
                raise ConfigError(
                    f"{each.name or flag_of(name)}: {value!r} must be {bounds_text(each, value)}"
                )


def is_within(each: Flag, value: float) -> bool:
    """Return whether a number is finite and within a flag's bounds."""
    return (
        math.isfinite(value)
        and (each.ge is None or value >= each.ge)
        and (each.gt is None or value > each.gt)
        and (each.le is None or value <= each.le)
        and (each.lt is None or value < each.lt)
    )


def bounds_text(each: Flag, value: float) -> str:
    """Return the bounds of a flag for a message about a value."""
    bounds = [
        f"{word} {getattr(each, key):g}" for key, word in _BOUNDS.items() if getattr(each, key) is not None
    ]
    return " and ".join(["finite", *bounds] if isinstance(value, float) else bounds)
