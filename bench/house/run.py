"""Counts what a reader of the product has before them; `make house` prints the table, `--json` all of it.

``--page`` writes the table into bench/house/RESULTS.md, alongside the counts of before.json.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from paths import Walk, count_local, count_reconcile
from source import FILE_LINES, FUNCTION_LINES, PRODUCT, SETTINGS, Source

ROOT = Path(__file__).parents[2]
BEFORE = Path(__file__).with_name("before.json")
PAGE = ROOT / "bench/house/RESULTS.md"
TABLE = re.compile(r"(?<=<!-- house -->\n).*?(?=\n<!-- /house -->)", re.DOTALL)


WALKS = {"chat": "a chat in the router", "decision": "a planner decision", "reconcile": "a reconciled graph"}


def count(root: Path, *, runs: bool) -> dict[str, Any]:
    """Return all counts of a checkout; without ``runs`` only those of its text."""
    product, tests = Source(root, *PRODUCT), Source(root, "tests", "e2e")
    found: dict[str, Any] = {
        "lines": product.lines(3),
        "test_lines": Source(root, "tests").lines(3),
        "settings": product.classes(SETTINGS),
        "declarations": product.declarations(),
        "writes": product.writes(),
        "namesakes": product.namesakes(),
        "backoffs": product.backoffs(),
        "circles": product.circles(),
        "long_files": product.long_files() + tests.long_files(),
        "long_functions": product.long_functions() + tests.long_functions(),
        "pokes": tests.pokes(),
        "sleeps": tests.sleeps(),
    }
    if runs:
        walks = {**count_local(root), "reconcile": count_reconcile(root)}
        found["walks"] = {
            name: {"files": each.files, "stays": each.stays, "returns": each.returns}
            for name, each in walks.items()
            if isinstance(each, Walk)
        }
        found["missing"] = {name: each for name, each in walks.items() if isinstance(each, str)}
    return found


def rows(found: dict[str, Any]) -> dict[str, int | str]:
    """Return the table's rows: one number each, or the reason why it was not counted."""
    return {
        "product lines": sum(found["lines"].values()),
        "test lines": sum(found["test_lines"].values()),
        **{
            f"files, stays, returns of {title}": ", ".join(map(str, found["walks"][name].values()))
            if name in found.get("walks", {})
            else found.get("missing", {}).get(name, "not counted")
            for name, title in WALKS.items()
        },
        "ways to declare a setting": sum(bool(count) for count in found["declarations"].values()),
        "writes into what a function was given": len(found["writes"]),
        "classes named Config, Settings, Spec, Options, Plan or Facts": len(found["settings"]),
        "class names that several classes have": len(found["namesakes"]),
        "doublings up to a limit": len(found["backoffs"]),
        "files in import circles": sum(map(len, found["circles"])),
        f"files over {FILE_LINES} lines": len(found["long_files"]),
        f"functions over {FUNCTION_LINES} lines": len(found["long_functions"]),
        "uses of private attributes in tests": found["pokes"],
        "sleeps in tests": found["sleeps"],
    }


def table(before: dict[str, Any], now: dict[str, Any]) -> str:
    """Return both counts side by side, in Markdown."""
    old, new = rows(before), rows(now)
    lines = ["| Count | Before | Now |", "|---|---:|---:|"]
    return "\n".join([*lines, *(f"| {name} | {old[name]} | {value} |" for name, value in new.items())])


def main() -> None:
    """Count, and print or write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout to count (this one)")
    parser.add_argument("--no-runs", action="store_true", help="count the text alone and start nothing")
    parser.add_argument("--json", action="store_true", help="print every count and name as JSON")
    parser.add_argument("--page", action="store_true", help="write the table into bench/house/RESULTS.md")
    parser.add_argument(
        "--outline",
        choices=WALKS,
        help="print the functions of this walk in the order of their first calls, and nothing else",
    )
    options = parser.parse_args()
    if options.outline:
        root = options.root.resolve()
        walk = count_reconcile(root) if options.outline == "reconcile" else count_local(root)[options.outline]
        if isinstance(walk, str):
            sys.exit(f"the walk of {WALKS[options.outline]} was not counted: {walk}")
        print(walk.outline)
        return
    found = count(options.root.resolve(), runs=not options.no_runs)
    if options.json:
        print(json.dumps(found, indent=1))
        return
    for name, reason in found.get("missing", {}).items():
        print(f"the walk of {WALKS[name]} was not counted: {reason}", file=sys.stderr)
    made = table(json.loads(BEFORE.read_text()), found)
    if options.page:
        PAGE.write_text(TABLE.sub(lambda _: made, PAGE.read_text()))
        return
    print(made)
    for name in ("lines", "test_lines"):
        print(f"\n{name.replace('_', ' ')}")
        print("\n".join(f"{lines:7}  {folder}" for folder, lines in found[name].items()))


if __name__ == "__main__":
    main()
