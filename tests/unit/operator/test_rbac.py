"""The chart grants the operator what its table of rights says."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from penstock.operator.rbac import RULES

CHART = Path(__file__).parents[3] / "charts" / "penstock" / "templates" / "_rules.tpl"


def _granted():
    text = CHART.read_text(encoding="utf-8")
    block = re.search(r'define "penstock.operatorRules" -}}\n(.*?){{- end -}}', text, re.DOTALL)
    assert block is not None
    rules = re.sub(r"{{-.*?}}", "", block[1])  # the most that is granted: with every condition true
    return {
        (group, resource): set(rule["verbs"])
        for rule in yaml.safe_load(rules)
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }


def test_every_right_of_the_table_is_granted():
    """Else the operator meets 403 in a real cluster."""
    granted = _granted()
    missing = {key: verbs - granted.get(key, set()) for key, verbs in RULES.items()}
    assert {key: verbs for key, verbs in missing.items() if verbs} == {}
