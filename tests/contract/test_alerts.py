"""The chart's alerts fire and stay silent as they should, by `promtool test rules`; absence of series included."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

sys.path.append(str(Path(__file__).parent))
from test_chart import of_kind, rendered

DATA = Path(__file__).parent / "data" / "alert_cases.yaml"
CASES = yaml.safe_load(DATA.read_text())


def promtool(*arguments, folder):
    """Run promtool in a folder; skips without it."""
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("no promtool on PATH; Debian's package prometheus has it")
    return subprocess.run(
        [found, *arguments], cwd=folder, capture_output=True, text=True, check=False, timeout=60
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with the chart's rules, as installed and without the words for people."""
    made = tmp_path_factory.mktemp("alerts")
    spec = of_kind(rendered("everything"), "PrometheusRule")["penstock"]["spec"]
    (made / "installed.yaml").write_text(yaml.safe_dump(spec))
    for group in spec["groups"]:
        for rule in group["rules"]:
            assert rule["annotations"]
        group["rules"] = [{k: v for k, v in rule.items() if k != "annotations"} for rule in group["rules"]]
    (made / "rules.yaml").write_text(yaml.safe_dump(spec))
    return made


def severities(folder):
    """Return each alert's severity."""
    groups = yaml.safe_load((folder / "rules.yaml").read_text())["groups"]
    return {rule["alert"]: rule["labels"]["severity"] for group in groups for rule in group["rules"]}


def as_promtool_reads(case, severity):
    """Return a case in promtool's own format."""
    checks = []
    for alert, times in case.get("silent", {}).items():
        checks += [{"eval_time": each, "alertname": alert, "exp_alerts": []} for each in times]
    for alert, expected in case.get("fires", {}).items():
        labels = [{"exp_labels": {**each["labels"], "severity": severity[alert]}} for each in expected]
        checks.append({"eval_time": expected[0]["at"], "alertname": alert, "exp_alerts": labels})
    series = [{"series": name, "values": values} for name, values in case["series"].items()]
    return {"interval": "1m", "name": case["name"], "input_series": series, "alert_rule_test": checks}


def test_the_rules_can_be_loaded(folder):
    """Expressions and templates of the annotations parse."""
    result = promtool("check", "rules", "installed.yaml", folder=folder)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"].replace(" ", "_"))
def test_alerts_fire_and_stay_silent(folder, case):
    """Exactly the expected series fire at the given times."""
    test = {"rule_files": ["rules.yaml"], "tests": [as_promtool_reads(case, severities(folder))]}
    (folder / "test.yaml").write_text(yaml.safe_dump(test))
    result = promtool("test", "rules", "test.yaml", folder=folder)
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_alert_has_a_case_of_each_kind(folder):
    """A rule that is never seen to fire may be one that cannot."""
    names = set(severities(folder))
    assert {alert for case in CASES for alert in case.get("fires", {})} == names
    assert {alert for case in CASES for alert in case.get("silent", {})} == names
