"""The checks of `kvxferd doctor`, what they find, and how it is printed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from kvxferd.config import Config, load_config
from kvxferd.errors import ConfigError, KvxferdError
from kvxferd.memory.driver import DRIVER_VARIABLE
from kvxferd.tooling.control_client import ControlClient
from kvxferd.tooling.exit_codes import EXIT_FAILED, EXIT_NO_GPU, EXIT_OK
from kvxferd.tooling.output import console, plain_text

RESPONSE_TIMEOUT_S = 5.0  # of the daemon

# Each check is the function of its name in that module, in the order of the report.
CHECKS = {
    "software": "software",
    "kernel": "host",
    "same_node": "network",
    "tcp": "network",
    "shared_memory": "host",
    "memlock": "host",
    "run_directory": "host",
    "answering": "daemon",
    "gpus": "gpu",
    "gpu_direct": "gpu",
    "cards": "network",
}


PLACEMENTS = "placements"  # what `--gpu` tries, which is no part of the usual report


class Verdict(StrEnum):
    """Whether the finding is good, could be better, or is a failure."""

    OK = "ok"
    WARN = "warn"  # it works, and something should be better
    FAIL = "no"  # this cannot be done here


class Finding(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One row of the report."""

    check: str  # the subject: the check itself, or a part of what it looks at
    verdict: Verdict
    found: str
    todo: str = ""
    essential: bool = False  # for "no": nothing works without it
    facts: dict[str, Any] = {}  # for machines, beyond the sentence
    name: str = ""  # of the check, as `--check` takes it

    @property
    def label(self) -> str:
        """The check, and its part where it has several."""
        return self.check if self.name in ("", self.check) else f"{self.name}: {self.check}"


class CheckContext(NamedTuple):
    """The node under examination."""

    config: Config
    daemon: ControlClient
    # Of movers: this process's variables, and those that the settings give movers.
    environment: Mapping[str, str]
    config_path: str = ""  # of the file that `config` is from, where the verb names one


Check = Callable[[CheckContext], Iterable[Finding]]


def ok(check: str, found: str, **facts: Any) -> Finding:
    """Return a finding that is as it should be."""
    return Finding(check=check, verdict=Verdict.OK, found=found, facts=facts)


def warn(check: str, found: str, todo: str, **facts: Any) -> Finding:
    """Return a finding that works and could be better."""
    return Finding(check=check, verdict=Verdict.WARN, found=found, todo=todo, facts=facts)


def fail(check: str, found: str, todo: str, *, essential: bool = False, **facts: Any) -> Finding:
    """Return a finding that does not work."""
    return Finding(
        check=check, verdict=Verdict.FAIL, found=found, todo=todo, essential=essential, facts=facts
    )


def no_daemon(check: str, error: KvxferdError, *, essential: bool = False) -> Finding:
    """Return the finding of a daemon that does not reply, from the error of `CheckContext.daemon`."""
    found, _, todo = error.message.removeprefix("cannot ask the daemon at ").partition("; ")
    return fail(check, found, todo or "see its log", essential=essential)


def context_of(
    config_path: Path | None, socket_path: str | None, findings: list[Finding], driver: str | None = None
) -> CheckContext:
    """Return the node under examination.

    A configuration that the daemon would refuse is added to the findings, and the defaults stand in for it.
    `driver`: the name of another GPU driver.
    """
    config = Config()
    try:
        config = load_config(config_path, os.environ, {})
    except KvxferdError as error:
        found = " ".join(error.message.split())  # several reasons are on lines, which a row does not have
        todo = "mend it: the daemon does not start with it"
        findings.append(fail("configuration", found, todo, essential=True))
    environment = {**os.environ, **config.mover.environment, **({DRIVER_VARIABLE: driver} if driver else {})}
    daemon = ControlClient(socket_path or config.control.socket, RESPONSE_TIMEOUT_S)
    return CheckContext(config, daemon, environment, str(config_path or ""))


def run_checks(node: CheckContext, names: Iterable[str] = ()) -> list[Finding]:
    """Return what these checks find, none: all. Raises ConfigError for a name that is none."""
    wanted = set(names)
    if unknown := sorted(wanted - set(CHECKS)):
        raise ConfigError(f"cannot check {', '.join(unknown)}: there are {', '.join(CHECKS)}")
    return [
        finding
        for name, module in CHECKS.items()
        if not wanted or name in wanted
        for finding in run_check(name, getattr(import_module(f"kvxferd.doctor.{module}"), name), node)
    ]


def run_check(name: str, check: Check, node: CheckContext) -> list[Finding]:
    """Return a check's findings. An exception is a finding too, so that the other checks still run."""
    try:
        found = list(check(node))
    except Exception as error:
        # What was not looked at is not known to work.
        found = [fail(name, f"this check failed: {error!r}", "report it", essential=True)]
    return [msgspec.structs.replace(finding, name=name) for finding in found]


def print_findings(findings: Sequence[Finding], title: str = "This node") -> None:
    """Print a line for each finding, and below it what to do."""
    from rich.text import Text

    styles = {Verdict.OK: "green", Verdict.WARN: "yellow", Verdict.FAIL: "red"}
    out = console()
    out.print(plain_text(title), style="bold", soft_wrap=True)
    width = max((len(finding.label) for finding in findings), default=0)
    for finding in findings:
        verdict = Text(f"{finding.verdict.value:4}", style=styles[finding.verdict])
        line = plain_text(f"  {finding.label:{width}}  {finding.found}")
        out.print(Text.assemble(verdict, line), soft_wrap=True)
        if finding.todo:
            out.print(plain_text(f"{'':6}to do: {finding.todo}"), soft_wrap=True)


def exit_status(findings: Sequence[Finding], needs_gpu: bool = False) -> int:
    """Return the exit status. `needs_gpu`: placements were to be tried."""
    if any(finding.essential and finding.verdict is Verdict.FAIL for finding in findings):
        return EXIT_FAILED
    return EXIT_NO_GPU if needs_gpu and all(finding.name != PLACEMENTS for finding in findings) else EXIT_OK
