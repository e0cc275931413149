"""Changes one thing at a time in the purest parts and counts the changes that their tests notice.

    make mutants [ARGS="budget rule request adaptive decide"]

mutmut makes the changes. It expects every package below ``src`` and writes alongside it, so it works on a copy, in an
environment of its own: it is not a dependency of the product. A share that falls shows tests that have become weaker.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("src/*", "operator/penstock_operator", "planner/penstock_planner")
BESIDE = ("tests", "docs", "manifests", "crds", "charts", "bench")
"""What the tests read alongside the packages."""

SURVIVED, NO_TEST = 0, 33
"""Exit codes that mutmut keeps of a change: its tests passed; none runs it."""

ENDS = {1: "noticed", SURVIVED: "survived", NO_TEST: "not run"}


@dataclass(frozen=True, slots=True)
class Part:
    """What is changed, and the tests that are to notice."""

    files: tuple[str, ...]
    tests: tuple[str, ...]


PARTS = {
    "budget": Part(
        ("src/penstock_operator/plan/budget.py",),
        ("tests/unit/operator/plan/test_budget.py", "tests/unit/operator/plan/test_budget_rollout.py"),
    ),
    "rule": Part(
        ("src/penstock/api/rule.py",),
        (
            "tests/unit/api/test_rule.py",
            "tests/contract/test_manifest_rules.py",
            "tests/contract/test_crds.py",
        ),
    ),
    "request": Part(
        ("src/penstock/router/core/request.py", "src/penstock/router/core/request_steps.py"),
        (
            "tests/unit/router/test_request_machine.py",
            "tests/unit/router/test_request_scripts.py",
            "tests/unit/router/test_deflection.py",
            "tests/unit/simulator/test_two_drivers.py",
        ),
    ),
    "adaptive": Part(
        ("src/penstock_planner/decide/policies/adaptive/rules.py",),
        (
            "tests/unit/planner/test_adaptive.py",
            "tests/unit/planner/test_adaptive_rules.py",
            "tests/unit/planner/test_decide_rules.py",
            "tests/unit/planner/test_served.py",
            "tests/unit/planner/test_trial.py",
        ),
    ),
    "decide": Part(("src/penstock_planner/decide/*",), ("tests/unit/planner",)),
}


def prepare(folder: Path, part: Part) -> None:
    """Copy the product and its tests, with mutmut's settings."""
    (folder / "src").mkdir()
    unread = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for pattern in PACKAGES:
        for package in ROOT.glob(pattern):
            if package.is_dir() and not package.name.endswith(".egg-info"):
                shutil.copytree(package, folder / "src" / package.name, ignore=unread)
    for name in BESIDE:
        shutil.copytree(ROOT / name, folder / name, ignore=unread)
    settings = {
        "source_paths": ["src"],
        "only_mutate": list(part.files),
        "also_copy": list(BESIDE),
        "pytest_add_cli_args_test_selection": list(part.tests),
        "pytest_add_cli_args": ["-p", "no:cacheprovider", "-m", "not slow and not nightly"],
    }
    rows = "".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items())
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (folder / "pyproject.toml").write_text(
        f"{text}\n[tool.mutmut]\n{rows}use_git_change_detection = false\n", encoding="utf-8"
    )


def run(mutmut: Path, folder: Path, jobs: int, sample: int | None) -> None:
    """Change and test; the second call finds the copied packages, which the first one's Python does not look for again.

    Args:
        mutmut: The program.
        folder: The prepared copy.
        jobs: Changes at a time.
        sample: How many changes to test, the same ones each time; None: all.
    """
    search = os.pathsep.join([str(folder / "mutants/src"), sysconfig.get_path("purelib")])
    command = [str(mutmut), "run", "--max-children", str(jobs)]
    environment = {**os.environ, "PYTHONPATH": search}
    subprocess.run(
        [*command, *(["none"] if sample else [])],
        cwd=folder,
        env=environment,
        capture_output=True,
        check=False,
    )
    names = sampled(folder, sample) if sample else []
    done = subprocess.run([*command, *names], cwd=folder, env=environment, capture_output=True, check=False)
    if done.returncode:
        sys.exit(done.stdout[-4000:].decode(errors="replace") + done.stderr[-4000:].decode(errors="replace"))


def sampled(folder: Path, sample: int) -> list[str]:
    """Return the names of this many changes, drawn from all."""
    names = sorted(codes(folder))
    return random.Random(0).sample(names, min(sample, len(names)))


def codes(folder: Path) -> dict[str, int | None]:
    """Return mutmut's exit code of each change; None: not tested."""
    found = {}
    for file in sorted(folder.glob("mutants/src/**/*.meta")):
        found.update(json.loads(file.read_text(encoding="utf-8"))["exit_code_by_key"])
    return found


def counted(folder: Path) -> tuple[dict[str, int], list[str]]:
    """Return how the changes ended, and the names of those that no test noticed."""
    ends = dict.fromkeys([*ENDS.values(), "stopped"], 0)
    unnoticed = []
    for name, code in codes(folder).items():
        if code is None:
            continue
        ends[ENDS.get(code, "stopped")] += 1
        if code in {SURVIVED, NO_TEST}:
            unnoticed.append(name)
    return ends, unnoticed


def main() -> None:
    """Run the parts that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("parts", nargs="*", default=[], help=f"of {', '.join(PARTS)} (all)")
    parser.add_argument("--mutmut", type=Path, default=ROOT / ".venv-mutmut/bin/mutmut", help="the program")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="changes at a time (cores)")
    parser.add_argument(
        "--sample", type=int, help="test only this many changes of each part, always the same (all)"
    )
    parser.add_argument("--show", action="store_true", help="list the changes that no test noticed")
    options = parser.parse_args()
    unknown = set(options.parts) - PARTS.keys()
    if unknown:
        parser.error(f"{', '.join(sorted(unknown))}: no such part; write some of {', '.join(PARTS)}")
    for name in options.parts or PARTS:
        with tempfile.TemporaryDirectory(prefix="penstock-mutants-") as made:
            folder = Path(made)
            prepare(folder, PARTS[name])
            run(options.mutmut.absolute(), folder, options.jobs, options.sample)
            ends, unnoticed = counted(folder)
        total = sum(ends.values())
        noticed = ends["noticed"] + ends["stopped"]
        said = ", ".join(f"{count} {end}" for end, count in ends.items())
        print(f"{name}: {noticed / max(1, total):.0%} of {total} changes noticed ({said})", flush=True)
        if options.show:
            print("\n".join(f"  {each}" for each in unnoticed))


if __name__ == "__main__":
    main()
