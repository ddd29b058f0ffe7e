"""Runs the checks of `kvxferd doctor`."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path

import msgspec

from kvxferd.config import Config, load_config
from kvxferd.doctor.finding import Check, CheckContext, Finding, fail
from kvxferd.errors import ConfigError, KvxferdError

# The module of each check, in the order of the report. A check may yield several findings.
CHECKS = {
    "software": "software",
    "kernel": "kernel",
    "processors": "processors",
    "same_node": "same_node",
    "tcp": "tcp",
    "shared_memory": "shared_memory",
    "memlock": "memlock",
    "descriptors": "fd_limit",
    "run_directory": "run_directory",
    "answering": "daemon_health",
    "workers": "workers",
    "gpus": "gpus",
    "gpu_direct": "gpu_direct",
    "cards": "network_cards",
}


def load_config_or_finding(path: Path | None, findings: list[Finding]) -> Config:
    try:
        return load_config(path, os.environ, {})
    except KvxferdError as error:
        found = " ".join(error.message.split())  # several reasons are on lines, which a table does not have
        findings.append(
            fail("configuration", found, "mend it: the daemon does not start with it", essential=True)
        )
        return Config()


def select_checks(names: tuple[str, ...]) -> list[tuple[str, Check]]:
    if unknown := sorted(set(names) - set(CHECKS)):
        raise ConfigError(f"cannot check {', '.join(unknown)}: there are {', '.join(CHECKS)}")
    chosen = [name for name in CHECKS if not names or name in names]
    return [(name, import_module(f"kvxferd.doctor.{CHECKS[name]}").check) for name in chosen]


def run_check(name: str, check: Check, node: CheckContext) -> list[Finding]:
    """Return a check's findings. An exception is a finding too, so that the other checks still run."""
    try:
        found = list(check(node))
    except Exception as error:
        found = [fail(name.replace("_", " "), f"this check failed: {error!r}", "report it")]
    return [msgspec.structs.replace(finding, name=name) for finding in found]
