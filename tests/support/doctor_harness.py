"""Runs `kvxferd doctor` as a user would, in surroundings of the test's choice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

LIMIT_S = 110.0


class Examination(NamedTuple):
    """What doctor said."""

    status: int
    findings: list[dict[str, Any]]
    said: dict[str, Any]

    def of(self, check: str) -> dict[str, Any]:
        """The one finding of that name."""
        (found,) = [finding for finding in self.findings if finding["check"] == check]
        return found


def examine(
    *flags: str, prefix: tuple[str, ...] = (), environment: Mapping[str, str] | None = None
) -> Examination:
    """Run it, with --json. A traceback anywhere fails the test."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("KVXFERD_")}
    done = subprocess.run(
        [*prefix, sys.executable, "-P", "-m", "kvxferd.cli", "doctor", "--json", *flags],
        env=environ | (environment or {}),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert "Traceback" not in done.stdout + done.stderr
    assert done.stdout, done.stderr
    said = json.loads(done.stdout)
    assert said["status"] == done.returncode
    for finding in said["findings"]:
        assert finding["found"], finding
        assert finding["verdict"] == "ok" or finding.get("todo"), "what is wrong says what to do"
    return Examination(done.returncode, said["findings"], said)
