"""Prints which autoscaler does what is expected in each of 62 situations.

Run: python bench/planner/conformance.py [--policies NAME,...] [--only NAME,...]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "plugins"))

from autoscaler_conformance.run import play
from autoscaler_conformance.scenarios import SCENARIOS, ConformanceScenario

from penstock_planner.decide.config import Mode
from penstock_planner.decide.policy import policy_names, policy_of

CONFORMABLE = tuple(name for name in policy_names() if name == Mode.SLA or not policy_of(name).needs_profile)
"""Policies that metrics are enough for, or the fluid's own profile; it has no latency profile and no future to know."""

Verdicts = dict[str, dict[str, bool]]
"""Whether a policy, by name, held a scenario, by name."""


def verdicts(policies: Sequence[str], scenarios: Sequence[ConformanceScenario] = SCENARIOS) -> Verdicts:
    """Return every policy's outcome in every scenario."""
    return {
        scenario.name: {policy: scenario.holds(play(policy, scenario.situation)) for policy in policies}
        for scenario in scenarios
    }


def verdicts_of(policy: str) -> Verdicts:
    """Return one policy's outcome in every scenario."""
    return verdicts([policy])


def merged(parts: Sequence[Verdicts]) -> Verdicts:
    """Return the outcomes of several policies together."""
    found: Verdicts = {}
    for part in parts:
        for name, held in part.items():
            found.setdefault(name, {}).update(held)
    return found


def table(
    found: Verdicts, policies: Sequence[str], scenarios: Sequence[ConformanceScenario] = SCENARIOS
) -> list[str]:
    """Return Markdown: a row per scenario, a column per policy, and the sums."""
    lines = [
        f"| situation | expected | {' | '.join(policies)} |",
        f"|---|---|{'---|' * len(policies)}",
    ]
    for scenario in scenarios:
        marks = " | ".join("yes" if found[scenario.name][policy] else "**no**" for policy in policies)
        lines.append(f"| {scenario.what} (`{scenario.name}`) | {scenario.expected} | {marks} |")
    sums = " | ".join(f"**{sum(row[policy] for row in found.values())}**" for policy in policies)
    lines.append(f"| **of {len(found)}** | | {sums} |")
    return lines


def main(arguments: Sequence[str]) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--policies", default=",".join(CONFORMABLE))
    parser.add_argument("--only", help="scenarios with commas between them")
    options = parser.parse_args(arguments)
    names = options.only.split(",") if options.only else [scenario.name for scenario in SCENARIOS]
    chosen = [scenario for scenario in SCENARIOS if scenario.name in names]
    policies = options.policies.split(",")
    print("\n".join(table(verdicts(policies, chosen), policies, chosen)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
