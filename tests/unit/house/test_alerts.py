"""Alerts name metrics that exist, have cases for promtool, and lead to a runbook."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from unbroken_core.vocabulary.alert_thresholds import STILL_S, STORM_RECOVERIES, STORM_S

ROOT = Path(__file__).parents[3]
RUNBOOKS = ROOT / "docs" / "runbooks"
RULES: list[dict[str, Any]] = [
    rule
    for group in yaml.safe_load((ROOT / "charts" / "unbroken" / "files" / "alerts.yaml").read_text())["groups"]
    for rule in group["rules"]
]
ALERTS = [rule for rule in RULES if "alert" in rule]


def metric_names() -> set[str]:
    """Return the names that docs/metrics.md has, with those of the parts of histograms and summaries."""
    lines = (ROOT / "docs" / "metrics.md").read_text().splitlines()
    found = [match for line in lines if (match := re.match(r"\| `(unbroken_\w+)` \| (\w+)", line))]
    parts = {"histogram": ("sum", "count", "bucket"), "summary": ("sum", "count")}
    return {match[1] for match in found} | {f"{match[1]}_{part}" for match in found for part in parts.get(match[2], ())}


@pytest.mark.parametrize("rule", RULES, ids=[rule.get("alert") or rule["record"] for rule in RULES])
def test_metrics_of_a_rule_exist(rule: dict[str, Any]) -> None:
    assert set(re.findall(r"\bunbroken_\w+", rule["expr"])) - metric_names() == set()


@pytest.mark.parametrize("alert", ALERTS, ids=[alert["alert"] for alert in ALERTS])
def test_an_alert_says_how_bad_it_is_and_has_a_runbook(alert: dict[str, Any]) -> None:
    assert alert["labels"]["severity"] in ("warning", "critical")
    assert set(alert["annotations"]) == {"summary", "description", "runbook_url"}
    page = ROOT / alert["annotations"]["runbook_url"]
    assert page.parent == RUNBOOKS
    text = page.read_text()
    assert alert["alert"] in text.splitlines()[0]
    for heading in ("**Meaning.**", "**Impact.**", "**Look.**", "**Do.**"):
        assert heading in text
    assert f"`{alert['alert']}`" in (RUNBOOKS / "README.md").read_text()


def test_the_page_of_dashboards_lists_all_alerts_as_they_are() -> None:
    text = (ROOT / "docs" / "dashboards.md").read_text()
    listed = re.findall(r"^\| \[`(\w+)`\]\((runbooks/[\w-]+\.md)\) \| .* \| (\w+) \|$", text, re.MULTILINE)
    wanted = {
        (alert["alert"], alert["annotations"]["runbook_url"].removeprefix("docs/"), alert["labels"]["severity"])
        for alert in ALERTS
    }
    assert set(listed) == wanted
    assert len(listed) == len(wanted)


@pytest.mark.parametrize("alert", ALERTS, ids=[alert["alert"] for alert in ALERTS])
def test_cases_for_promtool_say_where_an_alert_fires_and_where_it_does_not(alert: dict[str, Any]) -> None:
    cases = yaml.safe_load((ROOT / "tests" / "integration" / "chart" / "alert_cases.yaml").read_text())["tests"]
    mine = [
        (case, check) for case in cases for check in case["alert_rule_test"] if check["alertname"] == alert["alert"]
    ]
    assert any(check["exp_alerts"] for _, check in mine)
    jobs = {name for case, _ in mine for item in case["input_series"] for name in _jobs(item["series"])}
    fired = {item["exp_labels"].get("training_job") for _, check in mine for item in check["exp_alerts"]}
    assert jobs - fired or any(not check["exp_alerts"] for _, check in mine)


def _jobs(series: str) -> list[str]:
    return re.findall(r'training_job="([^"]+)"', series)


def test_conditions_and_alerts_use_the_same_numbers() -> None:
    rules = {alert["alert"]: alert for alert in ALERTS}
    storm, still = rules["UnbrokenRestartStorm"], rules["UnbrokenNoProgress"]
    assert f"[{STORM_S // 60}m])) > {STORM_RECOVERIES}" in storm["expr"]
    window_min = re.search(r"progress_seconds_total\[(\d+)m]\)\) == 0", still["expr"])
    assert window_min is not None
    assert (int(window_min[1]) + int(still["for"].removesuffix("m"))) * 60 == STILL_S
    for page in ("dashboards.md", "reference/conditions.md", "reference/api.md"):
        text = " ".join((ROOT / "docs" / page).read_text().split())
        assert f"more than {STORM_RECOVERIES} recoveries" in text
        assert f"{STORM_S // 60} minutes" in text
        assert f"{STILL_S // 60} minutes" in text


def test_every_runbook_belongs_to_an_alert() -> None:
    named = {Path(alert["annotations"]["runbook_url"]).name for alert in ALERTS}
    assert {page.name for page in RUNBOOKS.glob("*.md")} - {"README.md"} == named
