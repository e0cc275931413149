"""The chart's alerts and dashboards name only real metrics, and alerts fire and stay silent as they should, by `promtool`."""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

sys.path.append(str(Path(__file__).parent))
from test_chart import CHART, ROOT, of_kind, rendered

from penstock.core import metric_names

DATA = Path(__file__).parent / "data" / "alert_cases.yaml"
CASES = yaml.safe_load(DATA.read_text())


def promtool(*arguments, folder):
    """Run promtool in a folder; skips without it."""
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("no promtool on PATH; Debian's package prometheus has it")
    return subprocess.run([found, *arguments], cwd=folder, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with the chart's rules, as installed and without the words for people."""
    made = tmp_path_factory.mktemp("alerts")
    spec = of_kind(rendered("everything"), "PrometheusRule")["penstock"]["spec"]
    (made / "installed.yaml").write_text(yaml.safe_dump(spec))
    spec = copy.deepcopy(spec)
    for rule in (each for group in spec["groups"] for each in group["rules"]):
        assert rule.pop("annotations")
    (made / "rules.yaml").write_text(yaml.safe_dump(spec))
    return made


def known_series():
    """Every name that a series of ours can have on the wire."""
    names = {each for key, each in vars(metric_names).items() if key.isupper() and isinstance(each, str)}
    suffixes = ("", metric_names.COUNTER_SUFFIX, "_bucket", "_sum", "_count")
    return {f"{name}{suffix}" for name in names for suffix in suffixes}


def series_in(text):
    """Names of series in a PromQL expression."""
    return set(re.findall(r"\b(?:penstock_|vllm:)[a-z0-9_:]+", text))


def alerts():
    """Alert rules of the chart."""
    rule = of_kind(rendered("everything"), "PrometheusRule")["penstock"]
    return [each for group in rule["spec"]["groups"] for each in group["rules"]]


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


def test_alerts_ask_for_metrics_that_exist():
    """A renamed metric would make its alert silent for ever."""
    asked = {name for each in alerts() for name in series_in(each["expr"])}

    assert len(asked) >= 10
    assert asked - known_series() == set()


def test_every_alert_says_what_to_do():
    """Severity, a summary, and a section of docs/alerts.md under its own name."""
    headings = {
        line.lstrip("# ").strip()
        for line in (ROOT / "docs" / "alerts.md").read_text().splitlines()
        if line.startswith("## ")
    }

    assert {each["alert"] for each in alerts()} == headings
    for each in alerts():
        assert each["labels"]["severity"] in {"critical", "warning", "info"}
        assert each["annotations"]["summary"]
        assert each["annotations"]["runbook_url"].endswith(f"alerts.md#{each['alert'].lower()}")


@pytest.mark.parametrize("path", sorted((CHART / "dashboards").glob("*.json")), ids=lambda path: path.stem)
def test_dashboards_ask_for_metrics_that_exist(path):
    """Every panel has a title, a description, an own id and queries over series that Penstock or vLLM writes."""
    dashboard = json.loads(path.read_text())
    panels = [each for each in dashboard["panels"] if each["type"] != "row"]
    asked = {name for panel in panels for target in panel["targets"] for name in series_in(target["expr"])}

    assert asked - known_series() == set()
    assert len({each["id"] for each in dashboard["panels"]}) == len(dashboard["panels"])
    assert all(each["title"] and each["description"] and each["targets"] for each in panels)
    shipped = of_kind(rendered("everything"), "ConfigMap")[f"penstock-dashboard-{path.stem}"]
    assert json.loads(shipped["data"][path.name]) == dashboard
