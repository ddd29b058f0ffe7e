"""Rules and dashboards name metrics that the daemon has, fire when they should, and lead to a runbook."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from docs.tools.surfaces import connector_metrics, daemon_metrics
from kvxferd.errors import Code
from tests.support.python_process import run_python
from tests.support.repository import ROOT

MONITORING = ROOT / "deploy" / "monitoring"
RULES = sorted((MONITORING / "rules").glob("*.yml"))
RULE_TESTS = sorted((MONITORING / "tests").glob("*.test.yml"))
ALERTS = MONITORING / "rules" / "kvxferd-alerts.yml"
RUNBOOKS = ROOT / "docs" / "how-to" / "when-something-is-wrong.md"
# What these labels may have; the first samples of a daemon show only some.
OUTCOMES = {"delivered", "failed", "cancelled"}
CODES = {code.value for code in Code} | {"ok", "none"}
# Of the Prometheus client's own collector, and of Prometheus itself.
FOREIGN = {
    *("up", "process_start_time_seconds", "process_open_fds", "process_max_fds"),
    *("process_cpu_seconds_total", "process_resident_memory_bytes"),
}


def rules_of(path: Path) -> Iterator[dict[str, Any]]:
    for group in yaml.safe_load(path.read_text())["groups"]:
        yield from group["rules"]


EVERY_RULE = [rule for path in RULES for rule in rules_of(path)]
EVERY_ALERT = [rule for rule in EVERY_RULE if "alert" in rule]


def name_of(rule: dict[str, Any]) -> str:
    return str(rule.get("alert") or rule["record"])


_SELECTOR = re.compile(r"\b((?:vllm:)?(?:kvxferd|process)_\w+|up)\b(?!\()(?:\{([^}]*)\})?")
_CONDITION = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"')


def selectors_of(expression: str) -> Iterator[tuple[str, list[tuple[str, str, str]]]]:
    """Yield each metric of an expression with its conditions: label, operator, value."""
    for metric, conditions in _SELECTOR.findall(expression):
        yield metric, _CONDITION.findall(conditions)


@cache
def families() -> dict[str, dict[str, list[str]]]:
    """Return the labels with their values of each series name of the daemon and the connector."""
    found: dict[str, dict[str, list[str]]] = {}
    for family in daemon_metrics().values():
        found |= dict.fromkeys(family.series, family.labels)
    for name in connector_metrics():
        for suffix in ("_total", "_bucket", "_sum", "_count"):
            found[name + suffix] = {}
    return found


def unknown_of(expression: str) -> Iterator[str]:
    """Yield what an expression names and the daemon does not have."""
    for metric, conditions in selectors_of(expression):
        if metric in FOREIGN:
            continue
        if metric not in families():
            yield f"there is no series {metric}"
            continue
        if metric.startswith("vllm:"):
            continue
        labels = families()[metric]
        for label, operator, value in conditions:
            if label in ("job", "instance") or value.startswith("$"):
                continue
            if label not in labels:
                yield f"{metric} has no label {label}"
                continue
            known = {"code": CODES, "why": CODES, "outcome": OUTCOMES | CODES}.get(label, set(labels[label]))
            values = value.split("|") if "~" in operator else [value]
            yield from (f"{metric} has no {label} {v}" for v in values if known and v not in known)


@pytest.mark.process
@pytest.mark.parametrize("rule", EVERY_RULE, ids=name_of)
def test_rules_name_what_the_daemon_has(rule: dict[str, Any]) -> None:
    assert list(unknown_of(rule["expr"])) == []
    assert list(selectors_of(rule["expr"]))


# Runbooks.


def sections() -> dict[str, str]:
    alerts = RUNBOOKS.read_text().partition("\n## Alerts\n")[2].partition("\n## ")[0]
    parts = re.split(r"^### ", alerts, flags=re.MULTILINE)[1:]
    return {part.partition("\n")[0]: " ".join(part.split()) for part in parts}


@pytest.mark.parametrize("alert", EVERY_ALERT, ids=name_of)
def test_an_alert_leads_to_its_runbook(alert: dict[str, Any]) -> None:
    name = alert["alert"]
    assert alert["labels"]["severity"] in ("critical", "warning")
    assert alert["annotations"]["runbook_url"].endswith(f"#{name.lower()}")  # `check_pages` has the rest
    assert set(alert["annotations"]) == {"summary", "description", "runbook_url"}
    section = sections()[name]
    assert [section.count(f"**{part}**:") for part in ("Find out", "Do")] == [1, 1]


def test_each_runbook_is_of_an_alert() -> None:
    assert sorted(sections()) == sorted(alert["alert"] for alert in EVERY_ALERT)


# Prometheus' own tool.


def promtool(*words: str) -> subprocess.CompletedProcess[str]:
    if shutil.which("promtool") is None:
        pytest.skip("there is no promtool (Debian's package prometheus has it)")
    return subprocess.run(
        ["promtool", *words], cwd=MONITORING, capture_output=True, text=True, check=False, timeout=250
    )


@pytest.mark.process
@pytest.mark.parametrize(
    "words",
    [("check", "rules", *map(str, RULES)), *(("test", "rules", str(path)) for path in RULE_TESTS)],
    ids=lambda words: f"{words[0]} {Path(words[-1]).name}",
)
def test_rules_are_valid_and_do_what_their_tests_expect(words: tuple[str, ...]) -> None:
    done = promtool(*words)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.process
def test_a_rule_that_does_not_fire_is_found(tmp_path: Path) -> None:
    """Each alert in turn can be left out, and the tests fail: every alert has a test."""
    test = next(path for path in RULE_TESTS if path.name.startswith("kvxferd"))
    for folder in ("tests", "rules"):
        (tmp_path / folder).mkdir()
    shutil.copy(test, tmp_path / "tests")
    rules = yaml.safe_load(ALERTS.read_text())
    for group in rules["groups"]:
        group["rules"] = [dict(rule, expr=f"({rule['expr']}) and vector(0) == 1") for rule in group["rules"]]
    (tmp_path / "rules" / ALERTS.name).write_text(yaml.safe_dump(rules))
    done = promtool("test", "rules", str(tmp_path / "tests" / test.name))
    assert done.returncode != 0
    for alert in EVERY_ALERT:
        assert f'alertname="{alert["alert"]}"' in done.stdout + done.stderr, alert["alert"]


# Dashboards.

DASHBOARDS = {path.stem: json.loads(path.read_text()) for path in sorted(MONITORING.glob("grafana/*.json"))}


PANELS = [
    pytest.param(dashboard, panel, id=f"{name}: {panel['title']}")
    for name, dashboard in DASHBOARDS.items()
    for panel in dashboard["panels"]
    if panel["type"] != "row"
]


@pytest.mark.parametrize(("dashboard", "panel"), PANELS)
def test_panels_name_what_the_daemon_has(dashboard: dict[str, Any], panel: dict[str, Any]) -> None:
    variables = {variable["name"] for variable in dashboard["templating"]["list"]} | {"__rate_interval"}
    assert panel["description"].endswith(".")
    assert panel["targets"]
    for target in panel["targets"]:
        expression = target["expr"]
        assert list(unknown_of(expression)) == []
        assert list(selectors_of(expression))
        assert set(re.findall(r"\$(\w+)", expression)) <= variables
        # A line's legend names labels that the expression leaves.
        for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
            assert label in expression or any(
                label in families().get(metric, {}) or label in ("instance", "job")
                for metric, _ in selectors_of(expression)
            )


# Files that are made from these.


@pytest.mark.process
def test_made_files_are_not_stale() -> None:
    done = run_python(str(MONITORING / "build.py"), "--check")
    assert done.returncode == 0, done.stdout + done.stderr
