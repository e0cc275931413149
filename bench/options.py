"""Options of benches: a flag per figure, with its default, and `--json`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(Path(__file__).parent))


def read_options(
    description: str | None, /, *, choices: dict[str, Any] | None = None, **defaults: Any
) -> argparse.Namespace:
    """Return what the command line says.

    Args:
        description: The bench's docstring, which names and explains its flags.
        choices: Allowed values by flag.
        defaults: By flag, each with a type; a tuple's flag takes several values, of the type of the first one.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, value in defaults.items():
        several = isinstance(value, tuple)
        kind = str if value is None else type(value[0] if several else value)
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=kind,
            default=value,
            nargs="*" if several else None,
            choices=(choices or {}).get(name),
            help=f"default: {value}",
        )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser.parse_args()
