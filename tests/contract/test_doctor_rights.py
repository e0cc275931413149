from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from penstock_operator.doctor.rights import OPERATOR_RIGHTS, PLANNER_RIGHTS

INSTALL = Path(__file__).parents[2] / "manifests/install.yaml"


def given(component):
    """What the rendered chart allows a component, as (group, resource, verb)."""
    objects = [each for each in yaml.safe_load_all(INSTALL.read_text(encoding="utf-8")) if each]
    roles = [
        each
        for each in objects
        if each["kind"] in {"Role", "ClusterRole"} and each["metadata"]["name"] == f"penstock-{component}"
    ]
    assert roles, f"no role of the {component} in {INSTALL}"
    return {
        (group, resource, verb)
        for role in roles
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


@pytest.mark.parametrize(
    ("component", "rights"), [("operator", OPERATOR_RIGHTS), ("planner", PLANNER_RIGHTS)]
)
def test_the_doctor_asks_for_nothing_that_the_chart_does_not_give(component, rights):
    """A right that no installation has would be reported as missing everywhere."""
    asked = {(each.group, each.resource, each.verb) for each in rights}
    assert asked - given(component) == set()
