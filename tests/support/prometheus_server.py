"""A real Prometheus with the alerts of deploy/monitoring, whose durations are scaled down."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.nodes.waiting import wait_until
from tests.support.ports import free_port
from tests.support.repository import ROOT

ALERTS = ROOT / "deploy" / "monitoring" / "rules" / "kvxferd-alerts.yml"
# 5 minutes are 5 s then, with ten scrapes in them.
SCALE = 60
SCRAPE_S = 0.5
MAX_FOR_S = 3  # of an alert: a mover is in doubt for 5 s, and nobody waits for 6 h that are scaled to minutes
# An alert that is due needs a scrape and an evaluation; a machine that is busy, a few.
LIMIT_S = 60.0

_SECONDS = {"s": 1, "m": 60, "h": 3600}
_DURATION = re.compile(r"(\d+)([smh])")


def scaled(duration: str, at_most_s: float = float("inf")) -> str:
    """Return a duration of Prometheus' divided by `SCALE`, in whole seconds."""
    number, unit = _DURATION.fullmatch(duration).groups()  # type: ignore[union-attr]
    return f"{max(1, min(at_most_s, round(int(number) * _SECONDS[unit] / SCALE))):g}s"


def scaled_rules(text: str) -> str:
    """Return rules with shorter windows and a shorter `for`."""
    rules = yaml.safe_load(text)
    for group in rules["groups"]:
        for rule in group["rules"]:
            rule["expr"] = re.sub(r"\[(\w+)\]", lambda found: f"[{scaled(found[1])}]", rule["expr"])
            if "for" in rule:
                rule["for"] = scaled(rule["for"], MAX_FOR_S)
    return yaml.safe_dump(rules)


def require_prometheus() -> None:
    """Skip the test where there is no Prometheus."""
    if shutil.which("prometheus") is None:
        pytest.skip("there is no prometheus (Debian's package prometheus has it)")


class PrometheusServer:
    """Scrapes the targets that it is given, as the job `kvxferd`."""

    def __init__(self, directory: Path) -> None:
        require_prometheus()
        directory.mkdir(parents=True)
        self._targets: dict[str, int] = {}
        self._targets_file = directory / "targets.json"
        self._write_targets()
        (directory / "alerts.yml").write_text(scaled_rules(ALERTS.read_text()))
        config: dict[str, Any] = {
            "global": {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "500ms"},
            "rule_files": ["alerts.yml"],
        }
        targets = [{"files": [str(self._targets_file)], "refresh_interval": "1s"}]
        config["scrape_configs"] = [{"job_name": "kvxferd", "file_sd_configs": targets}]
        (directory / "prometheus.yml").write_text(yaml.safe_dump(config))
        self.log = directory / "prometheus.log"
        port = free_port()
        self._url = f"http://127.0.0.1:{port}"
        command = [
            "prometheus",
            f"--config.file={directory / 'prometheus.yml'}",
            f"--storage.tsdb.path={directory / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
            "--log.level=warn",
        ]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        wait_until(lambda: self._replies("/-/ready"), "Prometheus is ready", LIMIT_S)

    def close(self) -> None:
        """End it; its files stay for the test's report."""
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def watch(self, name: str, port: int) -> None:
        """Scrape that port from now on; `instance` is the name."""
        self._targets[name] = port
        self._write_targets()
        wait_until(lambda: self.query(f'up{{instance="{name}"}}'), f"{name} is scraped", LIMIT_S)

    def forget(self, name: str) -> None:
        """Scrape it no more."""
        del self._targets[name]
        self._write_targets()

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the samples of an instant query: `metric` and `value`."""
        path = "/api/v1/query?" + urllib.parse.urlencode({"query": expression})
        try:
            reply = self._get(path)
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{expression}: {error.read().decode()}") from error
        return list(reply["data"]["result"])

    def firing(self) -> list[dict[str, Any]]:
        """Return the alerts that fire: `labels` and `annotations`."""
        alerts = self._get("/api/v1/alerts")["data"]["alerts"]
        return [alert for alert in alerts if alert["state"] == "firing"]

    def alert(self, name: str, **labels: str) -> dict[str, Any] | None:
        """Return the alert of that name and with those labels, if it fires."""
        wanted = {"alertname": name, **labels}
        return next((a for a in self.firing() if wanted.items() <= a["labels"].items()), None)

    def await_alert(self, name: str, **labels: str) -> dict[str, Any]:
        """Return the alert once it fires."""
        deadline = time.monotonic() + LIMIT_S
        while (found := self.alert(name, **labels)) is None:
            others = sorted({a["labels"]["alertname"] for a in self.firing()})
            assert time.monotonic() < deadline, f"{name} does not fire within {LIMIT_S} s; {others} do"
            time.sleep(SCRAPE_S / 2)
        return found

    def await_clear(self, name: str, **labels: str) -> None:
        """Return once the alert fires no more."""
        wait_until(lambda: self.alert(name, **labels) is None, f"{name} {labels} clears", LIMIT_S)

    def _write_targets(self) -> None:
        groups = [
            {"targets": [f"127.0.0.1:{port}"], "labels": {"instance": name}}
            for name, port in self._targets.items()
        ]
        # Prometheus may read at any moment.
        draft = self._targets_file.with_suffix(".new")
        draft.write_text(json.dumps(groups))
        draft.rename(self._targets_file)

    def _replies(self, path: str) -> bool:
        assert self._process.poll() is None, f"Prometheus ended: {self.log.read_text()[-2000:]}"
        with suppress(OSError), urllib.request.urlopen(self._url + path, timeout=5):
            return True
        return False

    def _get(self, path: str) -> Any:
        with urllib.request.urlopen(self._url + path, timeout=20) as reply:
            return json.load(reply)
