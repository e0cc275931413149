"""Write the CustomResourceDefinitions, or check that the written ones are current.

``python -m penstock.api.crd`` renews ``crds/`` and the chart's copies below the current folder;
``--check`` writes nothing and exits 1 if a file differs.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import yaml

from penstock.api.crd.definition import definitions, file_name

FOLDERS = (Path("crds"), Path("charts/penstock/files/crds"))
"""Where the files go, below the repository's root; the copies are identical."""

_HEADER = "# Written from the models by `make crds`; a test keeps it current.\n"


class _Dumper(yaml.SafeDumper):
    """Repeats shared parts in place of YAML anchors, indents list items, and writes a pod's keys in one flow."""

    def ignore_aliases(self, data: Any) -> bool:
        del data
        return True

    def represent_mapping(self, tag: str, mapping: Any, flow_style: bool | None = None) -> yaml.MappingNode:  # noqa: FBT001
        """Write Kubernetes' own keys, some thousand, without a line each."""
        is_pods = "$patch" in mapping.get("properties", {})
        return super().represent_mapping(tag, mapping, True if is_pods else flow_style)

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:  # noqa: FBT001, FBT002
        del indentless
        super().increase_indent(flow, False)


def documents() -> dict[str, str]:
    """Return the files' text by file name."""
    return {
        file_name(each): _HEADER
        + yaml.dump(each, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)
        for each in definitions().values()
    }


def stale(root: Path) -> list[Path]:
    """Return the files below ``root`` that are absent or differ from the models."""
    return [
        folder / name
        for folder in FOLDERS
        for name, text in documents().items()
        if not (path := root / folder / name).is_file() or path.read_text(encoding="utf-8") != text
    ]


def write(root: Path) -> None:
    """Write every file below ``root``."""
    for folder in FOLDERS:
        (root / folder).mkdir(parents=True, exist_ok=True)
        for name, text in documents().items():
            (root / folder / name).write_text(text, encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    """Run the command; 0 done or current, 1 stale."""
    parser = argparse.ArgumentParser(prog="python -m penstock.api.crd", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a file is stale")
    parser.add_argument("--root", type=Path, default=Path(), help="repository's root (default: here)")
    options = parser.parse_args(argv)
    if not options.check:
        write(options.root)
        return 0
    found = stale(options.root)
    for path in found:
        sys.stderr.write(f"{path} differs from the models; run `make crds` and commit it\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
