from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from penstock.operator.doctor.check import component_of, scope_of
from penstock.operator.rbac import OPERATOR_RIGHTS, PLANNER_RIGHTS

INSTALL = Path(__file__).parents[2] / "manifests/install.yaml"


def rendered():
    """The objects of the rendered chart."""
    return [each for each in yaml.safe_load_all(INSTALL.read_text(encoding="utf-8")) if each]


def given(component):
    """What the rendered chart allows a component, as (group, resource, verb)."""
    roles = [
        each
        for each in rendered()
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


def test_the_chart_labels_what_the_doctor_looks_for():
    """Operator and planner are found by label, and so are their scope and account."""
    found = [
        each
        for each in rendered()
        if each["kind"] == "Deployment"
        and each["metadata"]["labels"].get("app.kubernetes.io/part-of") == "penstock"
    ]
    assert sorted(component_of(each) for each in found) == ["operator", "planner"]
    assert {scope_of(each) for each in found} == {None}
    for each in found:
        account = each["spec"]["template"]["spec"]["serviceAccountName"]
        assert account == f"penstock-{component_of(each)}"
