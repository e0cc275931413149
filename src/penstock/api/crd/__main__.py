"""``python -m penstock.api.crd`` writes ``crds/`` and the chart's copies below the current folder; a test compares them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from penstock.api.crd import definitions, file_name

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
        is_pods = "x-kubernetes-preserve-unknown-fields" in mapping and "properties" in mapping
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


def write(root: Path) -> None:
    """Write every file below ``root``."""
    for folder in FOLDERS:
        (root / folder).mkdir(parents=True, exist_ok=True)
        for name, text in documents().items():
            (root / folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(Path())
