"""Manifests of Kubernetes as tests read them: rendered, with the environment that the kubelet makes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.repository import ROOT

KUBERNETES = ROOT / "deploy" / "kubernetes"
MIN_KUBECTL = (1, 27)

# What the kubelet would fill in.
FIELDS = {"status.hostIP": "10.0.0.7", "status.podIP": "10.244.1.7", "spec.nodeName": "node-a"}

_REFERENCE = re.compile(r"\$\((\w+)\)")

Manifest = dict[str, Any]


@cache
def _reason_against_kubectl() -> str:
    if shutil.which("kubectl") is None:
        return "there is no kubectl"
    done = subprocess.run(
        ["kubectl", "version", "--client", "--output=json"], capture_output=True, text=True, check=False
    )
    version = json.loads(done.stdout)["clientVersion"] if done.returncode == 0 else {}
    found = tuple(int(re.sub(r"\D", "", version.get(part, "0"))) for part in ("major", "minor"))
    return "" if found >= MIN_KUBECTL else f"kubectl {found} is older than {MIN_KUBECTL}"


def require_kubectl() -> None:
    """Skip the test where no kubectl has kustomize as the overlays need it."""
    if reason := _reason_against_kubectl():
        pytest.skip(reason)


@cache
def _render(path: Path) -> str:
    done = subprocess.run(
        ["kubectl", "kustomize", str(path)], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def render(path: Path) -> list[Manifest]:
    """Return what `kubectl kustomize` makes of a folder. Skips the test where there is no kubectl for it."""
    require_kubectl()
    return list(yaml.safe_load_all(_render(path)))


def of_kind(manifests: list[Manifest], *kinds: str) -> list[Manifest]:
    """Return the manifests of those kinds."""
    return [manifest for manifest in manifests if manifest["kind"] in kinds]


def pod_of(manifest: Manifest) -> Manifest:
    """Return the pod's specification, of a Pod or a workload's template."""
    spec: Manifest = manifest["spec"]
    return spec if manifest["kind"] == "Pod" else spec["template"]["spec"]


def containers_of(pod: Manifest) -> dict[str, Manifest]:
    """Return every container by its name, those that start first included."""
    return {c["name"]: c for c in (*pod.get("initContainers", ()), *pod["containers"])}


def environment_of(container: Manifest, fields: Mapping[str, str] = FIELDS) -> dict[str, str]:
    """Return the variables as the kubelet sets them: $(NAME) stands for one that is listed before."""
    environment: dict[str, str] = {}
    for entry in container.get("env", ()):
        if "valueFrom" in entry:
            environment[entry["name"]] = fields[entry["valueFrom"]["fieldRef"]["fieldPath"]]
        else:
            value = _REFERENCE.sub(lambda match: environment.get(match[1], match[0]), entry["value"])
            environment[entry["name"]] = value
    return environment


def mounts_of(container: Manifest) -> dict[str, Manifest]:
    """Return the mounts by the path in the container."""
    return {mount["mountPath"]: mount for mount in container.get("volumeMounts", ())}
