"""Write what is made from the files of this folder: dashboards, and Kubernetes' form of the rules.

python deploy/monitoring/build.py [--check]

dashboards.yml becomes grafana/*.json, rules/kvxferd-alerts.yml the resource that Prometheus' operator reads.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
ALERTS = HERE / "rules" / "kvxferd-alerts.yml"
DASHBOARDS = HERE / "dashboards.yml"
COMPONENTS = HERE.parent / "kubernetes" / "components"
COMMAND = "python deploy/monitoring/build.py"

# Of Grafana 8 and newer, which bring what they read up to date themselves.
SCHEMA_VERSION = 36
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDTH = 24  # columns of Grafana's grid
STAT_HEIGHT, GRAPH_HEIGHT = 4, 8
MAX_GRAPHS = 4  # beside each other; more take two lines

Json = dict[str, Any]


def main() -> int:
    """Write the stale files, or name them. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a file is stale")
    check = parser.parse_args().check
    stale = {p: text for p, text in outputs().items() if not p.exists() or p.read_text() != text}
    for path, text in stale.items():
        if not check:
            path.write_text(text)
        print(f"{'stale' if check else 'wrote'}: {path.relative_to(HERE.parent.parent)}")
    if check and stale:
        print(f"run: {COMMAND}")
    return 1 if check and stale else 0


def outputs() -> dict[Path, str]:
    """Return each file that is made, with its text."""
    files = {COMPONENTS / "prometheus-rules" / "prometheus-rule.yaml": prometheus_rule()}
    for source in yaml.safe_load(DASHBOARDS.read_text()):
        text = json.dumps(dashboard(source), indent=1, ensure_ascii=False) + "\n"
        files[HERE / "grafana" / f"{source['uid']}.json"] = text
    return files


def prometheus_rule() -> str:
    """Return the alerts as the resource that Prometheus' operator reads."""
    resource: Json = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "kvxferd", "labels": {"app.kubernetes.io/name": "kvxferd"}},
        "spec": yaml.safe_load(ALERTS.read_text()),
    }
    text = yaml.safe_dump(resource, sort_keys=False, width=110, allow_unicode=True)
    return f"# Made from deploy/monitoring/rules/{ALERTS.name} by: {COMMAND}\n{text}"


def dashboard(source: Json) -> Json:
    """Return a dashboard as Grafana imports it."""
    variables = [
        _datasource(),
        *(_variable(name, query, source["where"]) for name, query in source["variables"].items()),
    ]
    return {
        "uid": source["uid"],
        "title": source["title"],
        "description": source["description"],
        "tags": ["kvxferd"],
        "schemaVersion": SCHEMA_VERSION,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "",
        "templating": {"list": variables},
        "links": [{"type": "dashboards", "tags": ["kvxferd"], "title": "kvxferd", "asDropdown": True}],
        "panels": list(_panels(source)),
    }


def _datasource() -> Json:
    return {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}


def _variable(name: str, query: str, where: str) -> Json:
    takes_several = f'=~"${name}"' in where
    return {
        "name": name,
        "label": name,
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": query, "refId": name},
        "definition": query,
        "refresh": 2,  # when the time range changes: nodes come and go
        "sort": 1,
        **({"multi": True, "includeAll": True, "allValue": ".*"} if takes_several else {}),
    }


def _panels(source: Json) -> Iterator[Json]:
    """Yield the rows' titles and panels, each with its place on the grid."""
    number, top = 1, 0
    for row in source["rows"]:
        yield {
            "id": number, "type": "row", "title": row["title"], "collapsed": False, "panels": [],
            "gridPos": {"x": 0, "y": top, "w": WIDTH, "h": 1},
        }  # fmt: skip
        number, top = number + 1, top + 1
        are_stats = all("stat" in panel for panel in row["panels"])
        height = STAT_HEIGHT if are_stats else GRAPH_HEIGHT
        columns = len(row["panels"])
        if not are_stats and columns > MAX_GRAPHS:
            columns = -(-columns // 2)
        for place, panel in enumerate(row["panels"]):
            below, beside = divmod(place, columns)
            width = WIDTH // columns
            grid = {"x": beside * width, "y": top + below * height, "w": width, "h": height}
            yield {"id": number, "gridPos": grid, **_panel(panel, source["where"])}
            number += 1
        top += -(-len(row["panels"]) // columns) * height


def _panel(panel: Json, where: str) -> Json:
    defaults: Json = {"unit": panel.get("unit", "short"), "min": 0}
    options: Json = {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}}
    stat = panel.get("stat")
    if stat is not None:
        defaults["thresholds"] = {"mode": "absolute", "steps": _steps(stat)}
        defaults["color"] = {"mode": "thresholds"}
        options = {
            "colorMode": "background" if stat else "value",
            "reduceOptions": {"calcs": ["lastNotNull"]},
        }
    return {
        "type": "timeseries" if stat is None else "stat",
        "title": panel["title"],
        "description": panel["text"],
        "datasource": DATASOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": [
            {
                "refId": chr(ord("A") + number),
                "datasource": DATASOURCE,
                "expr": _expanded(expression, where),
                "legendFormat": legend,
            }
            for number, (legend, expression) in enumerate(panel["queries"].items())
        ],
    }


def _expanded(expression: str, where: str) -> str:
    return re.sub(
        r"\$or_none\((\w+)\)",
        r'> 0 or label_replace(vector(0), "\1", "none", "", "")',
        expression.replace("$where", where),
    )


def _steps(stat: Json) -> list[Json]:
    """Return the colours of a number: green, and red from `bad` on, or below `bad_below`."""
    if "bad_below" in stat:
        return [{"color": "red", "value": None}, {"color": "green", "value": stat["bad_below"]}]
    return [
        {"color": "green", "value": None},
        *([{"color": "red", "value": stat["bad"]}] if "bad" in stat else []),
    ]


if __name__ == "__main__":
    sys.exit(main())
