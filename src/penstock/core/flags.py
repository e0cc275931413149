"""Settings as dataclass fields with help text, bounds and flag names.

The command line is generated from them (`penstock.cli.fields`), and `check_bounds` applies the bounds for callers in
Python.
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
    """Command-line options of a dataclass field.

    Attributes:
        help: Help text.
        name: Name of the flag; None means the field's name with hyphens.
        unset: Text that the help shows as the default, for a flag whose default is None; None shows nothing.
        metavar: Placeholder of the value in the help; None means the type.
        choices: Allowed values; empty allows any.
        path: Kind of path that the value names; None if it is not a path.
        convert: Converts the flag's value to the field's value; None uses the flag's value unchanged.
        form: Description of the value's form with an example, if ``convert`` parses text.
        is_separated: Whether one argument has all values of a tuple, separated by commas; else the flag is repeated.
        bare: Value of the field if the flag is given without a value; None means that a value is required.
        short: Short names of the flag, such as ``-n``.
        variable: Environment variable that sets the value.
        key_variable: Environment variable with a secret key; the key is never a command-line argument, and the value of
            the flag is a file that contains it.
        ge: Minimum, inclusive.
        gt: Minimum, exclusive.
        le: Maximum, inclusive.
        lt: Maximum, exclusive.
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
    """Return a dataclass field that the command line offers as a flag.

    Args:
        text: Help text.
        default: Default value of the field. Without a default the field is required, unless ``unset`` is given: then
            the default is None.
        **details: Other fields of `Flag`.
    """
    found = Flag(help=text, **details)
    if default is MISSING and found.unset is not None:
        default = None
    return field(default=default, repr=found.key_variable is None, metadata={_KEY: found})


def duration_flag(text: str, **details: Any) -> Any:
    """Return a dataclass field for a duration in seconds, whose flag takes a text with a unit; arguments as in `flag`."""
    form = f"a duration, such as {EXAMPLES}"
    return flag(text, convert=seconds_of, form=form, metavar="DURATION", **details)


def attainment_flag(text: str, **details: Any) -> Any:
    """Return the dataclass field of ``--attainment``; arguments as in `flag`."""
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
"""Former flags, each with an instruction what to write instead."""


MEANT_FLAGS: Final[Mapping[str, tuple[str, ...]]] = {
    **dict.fromkeys(("--rps", "--request-rate", "--requests-per-second"), ("--rate",)),
    **dict.fromkeys(("--requests", "--num-requests", "--num-prompts", "--count"), ("--limit",)),
    **dict.fromkeys(("--budget", "--gpu-budget", "--gpus"), ("--max-gpus", "--max-gpu-budget")),
    **dict.fromkeys(("--out", "--output", "--output-folder"), ("--output-dir",)),
    **dict.fromkeys(("--file", "--graph", "--config"), ("--manifest",)),
    **dict.fromkeys(("--address", "--base-url", "--server", "--endpoint"), ("--url",)),
    **dict.fromkeys(("--slo", "--ttft-target"), ("--ttft-slo",)),
    **dict.fromkeys(("--itl-target", "--tpot-slo", "--tpot"), ("--itl-slo",)),
    **dict.fromkeys(("--dataset", "--workload"), ("--trace",)),
    **dict.fromkeys(("--dask", "--cluster"), ("--on",)),
    **dict.fromkeys(("--processes", "--parallel", "--workers"), ("--jobs", "--worker")),
    **dict.fromkeys(("--seed", "--runs"), ("--seeds",)),
}
"""Flags of other tools, each with Penstock's flags of the same meaning; the first one that a command has is
suggested."""


def time_scale(default: float = 1.0, *, more: str = "") -> Any:
    """Return the dataclass field of ``--speed``, the time scale: simulated seconds per wall-clock second.

    Args:
        default: Default value.
        more: Text that is appended to the help.
    """
    text = f"Time scale: simulated seconds per real second{more}."
    return flag(text, default=default, convert=lambda value: SimulatedClock(value).speed)


def flag_of(name: str) -> str:
    """Return the flag of a field's name, such as ``--max-step`` for ``max_step``."""
    return f"--{name.replace('_', '-')}"


def flags(model: Any) -> dict[str, Flag]:
    """Return the flags of a dataclass, by field name; fields without a flag are left out."""
    return {each.name: each.metadata[_KEY] for each in fields(model) if _KEY in each.metadata}


def check_bounds(settings: Any) -> None:
    """Check that every number in a dataclass is within its flag's bounds.

    Raises:
        ConfigError: A number is not finite or outside the bounds.
    """
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
    """Return the bounds of a flag as text, for a message about ``value``."""
    bounds = [
        f"{word} {getattr(each, key):g}" for key, word in _BOUNDS.items() if getattr(each, key) is not None
    ]
    return " and ".join(["finite", *bounds] if isinstance(value, float) else bounds)
