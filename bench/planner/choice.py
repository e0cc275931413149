"""What a run of the scoreboard is asked for: its options, and the workloads, policies and seeds that they choose."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "plugins"))

from days import KIND as DAYS
from days import days
from workloads import Case, cases

from penstock_planner.decide.policy import policy_names, policy_of

DATA_VARIABLE = "PENSTOCK_TRACES"
"""Folder of traces that are not packaged; `--data` wins."""
SEEDS = 2
"""Of the tuned workloads; nothing was looked at of the others, so that one is enough."""
POLICIES = tuple(name for name in policy_names() if not policy_of(name).is_oracle)
"""Oracles are references, made for each case: see `reference`."""
QUICK_POLICIES = ("adaptive", "hpa", "hpa-rate")


def options_of(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options; ``is_part`` says that not the whole suite is run, ``words`` what a reader repeats it with."""
    parser = argparse.ArgumentParser(description="The planner's scoreboard, in virtual time.")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a few workloads, one seed: a minute or two; fails where the default serves too little alongside a fixed fleet of its cost",
    )
    parser.add_argument("--data", type=Path, help=f"folder of traces [default: ${DATA_VARIABLE}]")
    parser.add_argument(
        "--workloads",
        "--cases",
        help=f"names with commas between them, {DAYS} for those of days [default: all but these]",
    )
    parser.add_argument("--policies", help="modes with commas between them [default: all]")
    parser.add_argument(
        "--seeds", type=_positive, help=f"seeds 0 to N - 1 [default: {SEEDS} of tuned workloads, else 1]"
    )
    parser.add_argument(
        "--search",
        action="store_true",
        help="only search fixed fleets and oracles again, and keep them; long",
    )
    parser.add_argument(
        "--reuse",
        type=Path,
        help="results.json of an earlier run: rows of autoscalers that are not ours are taken from it; they change"
        " only with the simulator and the shared bounds",
    )
    parser.add_argument(
        "--before", type=Path, help="results.json of an earlier run to show the default alongside"
    )
    parser.add_argument("--output", type=Path, help="folder [default: this one, for the whole suite]")
    parser.add_argument("--json", action="store_true", help="print every cell as JSON instead of a table")
    parser.add_argument("--jobs", type=_positive, help="processes [default: 2, or the cluster's]")
    parser.add_argument(
        "--on",
        help="dask, or dask://HOST:PORT of a scheduler whose workers have this folder on PYTHONPATH [default: processes]",
    )
    parser.add_argument(
        "--journal",
        type=Path,
        help="folder of finished cells, from which a killed run continues [default: none]",
    )
    options = parser.parse_args(arguments)
    if options.jobs is None and options.on is None:
        options.jobs = 2
    options.is_part = bool(options.quick or options.workloads or options.policies or options.seeds)
    given = {"--workloads": options.workloads, "--policies": options.policies, "--seeds": options.seeds}
    options.words = ["--quick"] if options.quick else []
    options.words += [f"{name} {value}" for name, value in given.items() if value]
    return options


def known_cases(options: argparse.Namespace) -> list[Case]:
    """Return every workload there are requests for."""
    folder = os.environ.get(DATA_VARIABLE)
    found = cases(options.data or (Path(folder) if folder else None))
    return [*found, *days()] if options.workloads else found


def chosen_cases(options: argparse.Namespace) -> list[Case]:
    """Return the workloads to run; exits with a message where a name is unknown."""
    known = known_cases(options)
    if options.workloads:
        names = _names("--workloads", options.workloads, [*(case.name for case in known), DAYS])
        return [case for case in known if case.name in names or (case.kind == DAYS and DAYS in names)]
    return [case for case in known if case.is_quick or not options.quick]


def chosen_policies(options: argparse.Namespace) -> list[str]:
    """Return the policies to run; exits with a message where a name is unknown."""
    if options.policies:
        return _names("--policies", options.policies, POLICIES)
    return list(QUICK_POLICIES if options.quick else POLICIES)


def seeds_of(case: Case, options: argparse.Namespace) -> int:
    """Return how many seeds a case is run with."""
    asked = int(options.seeds or (SEEDS if case.is_tuned and not options.quick else 1))
    return asked if case.seeds is None else min(asked, case.seeds)


def _names(option: str, text: str, known: Sequence[str]) -> list[str]:
    names = text.split(",")
    unknown = sorted(set(names) - set(known))
    if unknown:
        sys.exit(f"{option} {','.join(unknown)}: choose from {', '.join(known)}")
    return names


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value}: must be at least 1")
    return value
