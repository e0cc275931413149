"""Writes objects as YAML that kubectl reads as they are."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import yaml


def as_yaml(objects: Sequence[dict[str, Any]]) -> str:
    """Return one YAML document per object, without anchors, texts of several lines as blocks."""
    return yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, width=110)


_PLAIN_ELSEWHERE = re.compile(r"[yYnN]|[-+]?(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d+)?|0o[0-7]+|0b[01]+")
"""Texts that PyYAML leaves bare and kubectl reads as a boolean or a number.

Source: go-yaml v2, resolve.go, which sigs.k8s.io/yaml is built on.
"""


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 - as PyYAML calls it
        return True


def _text(dumper: _Dumper, data: str) -> yaml.ScalarNode:
    style = "|" if "\n" in data else "'" if _PLAIN_ELSEWHERE.fullmatch(data) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", data, style=style)


_Dumper.add_representer(str, _text)
