"""What is deployed agrees with what is built: the unit, the manifests, and their settings."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvxferd.config import CONFIG_PATH_VARIABLE, SETTINGS, Config
from kvxferd.config.schema import NodeConfig
from kvxferd.daemon import STOP_S

DEPLOY = Path(__file__).parents[2] / "deploy"
UNIT = (DEPLOY / "kvxferd.service").read_text()
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
VARIABLES = {setting.variable for setting in SETTINGS.values()} | {CONFIG_PATH_VARIABLE}


def unit_option(name: str) -> str:
    (value,) = re.findall(rf"^{name}=(.*)$", UNIT, re.MULTILINE)
    return value


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_has_nothing_to_say_about_the_unit(tmp_path: Path) -> None:
    # The unit's own program is not installed where this runs.
    unit = tmp_path / "kvxferd.service"
    unit.write_text(UNIT.replace(unit_option("ExecStart").split()[0], sys.executable))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_unit_reloads_the_file_that_it_starts_with() -> None:
    assert unit_option("ExecReload").split()[1:] == ["reload", *unit_option("ExecStart").split()[2:]]


def test_the_unit_waits_longer_than_a_drain() -> None:
    assert unit_option("Type") == "notify"
    assert float(unit_option("TimeoutStopSec")) > Config().drain.limit_s + STOP_S


def test_the_run_directory_outlives_a_stop_and_a_start() -> None:
    # It holds owners.json and the directory that pods mount.
    assert unit_option("RuntimeDirectory") == "kvxferd"
    assert unit_option("RuntimeDirectoryPreserve") == "yes"


def pods(path: Path) -> list[dict[str, Any]]:
    documents = list(yaml.safe_load_all(path.read_text()))
    assert all(set(document) >= {"apiVersion", "kind", "metadata", "spec"} for document in documents)
    for document in documents:
        template = document["spec"]["template"]
        assert document["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    return [document["spec"]["template"]["spec"] for document in documents]


def daemon_of(pod: dict[str, Any]) -> dict[str, Any]:
    (container,) = [c for c in pod["containers"] if c["name"] == "kvxferd"]
    return container


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_a_manifest_mounts_what_it_names_and_sets_what_there_is(path: Path) -> None:
    for pod in pods(path):
        volumes = {volume["name"] for volume in pod["volumes"]}
        mounted = {mount["name"] for c in pod["containers"] for mount in c["volumeMounts"]}
        assert mounted == volumes
        assert pod["terminationGracePeriodSeconds"] > Config().drain.limit_s + STOP_S
        daemon = daemon_of(pod)
        mounts = {mount["mountPath"] for mount in daemon["volumeMounts"]}
        assert "/dev/shm" in mounts
        environment = {entry["name"]: entry.get("value", "") for entry in daemon["env"]}
        own = environment.get("KVXFERD_NODE_RUN_DIR", NodeConfig().run_dir)
        worker = Path(environment.get("KVXFERD_WORKER_SOCKET", f"{own}/worker/worker.sock"))
        assert mounts & {str(worker.parent), own}
        for engine in (c for c in pod["containers"] if c["name"] != "kvxferd"):
            assert [mount["mountPath"] for mount in engine["volumeMounts"]] == [str(worker.parent)]
        named = {entry["name"] for entry in daemon["env"] if entry["name"].startswith("KVXFERD_")}
        assert named <= VARIABLES
        ports = {port["name"] for port in daemon["ports"]}
        assert daemon["readinessProbe"]["httpGet"]["path"] == "/readyz"
        assert daemon["readinessProbe"]["httpGet"]["port"] in ports


def test_both_forms_are_there() -> None:
    (daemon_set,) = pods(DEPLOY / "kubernetes" / "daemonset.yaml")
    assert daemon_set["hostPID"] is True
    assert {"hostPath"} <= {key for v in daemon_set["volumes"] if v["name"] == "run" for key in v}
    (sidecar,) = pods(DEPLOY / "kubernetes" / "sidecar.yaml")
    assert sidecar["shareProcessNamespace"] is True
    assert len(sidecar["containers"]) == 2
