"""What was run of each release of vLLM: docs/evidence/vllm.toml, for docs/reference/vllm-support.md."""

from __future__ import annotations

import json
import tomllib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from tests.proofs.vllm.environment import Build
from tests.support.repository import ROOT

EVIDENCE = ROOT / "docs" / "evidence" / "vllm.toml"
HEAD = (
    "# The last recorded run of each release of vLLM: `make test-vllm VERSION=... ARGS=--record` writes it.\n"
)


class ModuleResult(NamedTuple):
    """What became of the tests of a module, at a commit."""

    commit: str
    passed: int
    failed: int
    skipped: dict[str, int]  # by why


class ReleaseRun(NamedTuple):
    """What was run of a release, by module; `nixl`: the NIXL that it pins, where the lock's is another."""

    build: Build
    nixl: str
    modules: dict[str, ModuleResult]


def read_report(report: Path, commit: str) -> dict[str, ModuleResult]:
    """Return the results that pytest wrote as JUnit XML, by the name of the module; {} if it wrote none."""
    found: dict[str, list[ElementTree.Element]] = {}
    if not report.exists():
        return found
    for case in ElementTree.parse(report).iter("testcase"):
        # A module that was skipped as a whole is a case without a class.
        names = (case.get("classname", "") or case.get("name", "")).split(".")
        (name,) = (part for part in names if part.startswith("test_"))
        found.setdefault(name, []).append(case)
    return {name: _result_of(cases, commit) for name, cases in found.items()}


def _result_of(cases: list[ElementTree.Element], commit: str) -> ModuleResult:
    skips = Counter(skip.get("message", "") for case in cases for skip in case.iter("skipped"))
    failed = sum(case.find("failure") is not None or case.find("error") is not None for case in cases)
    return ModuleResult(commit, len(cases) - failed - skips.total(), failed, dict(skips))


def kept_runs() -> dict[str, ReleaseRun]:
    """Return each release's last recorded run."""
    return runs_of(EVIDENCE.read_text()) if EVIDENCE.exists() else {}


def keep(run: ReleaseRun) -> None:
    """Write down a run. Modules that it had not are kept of an earlier one of the same build."""
    runs = kept_runs()
    former = runs.get(run.build.release)
    if former is not None and former.build == run.build:
        run = run._replace(modules=former.modules | run.modules)
    EVIDENCE.write_text(text_of(runs | {run.build.release: run}))


def runs_of(text: str) -> dict[str, ReleaseRun]:
    """Return the runs of a text that `text_of` made."""
    found = {}
    for release, kept in tomllib.loads(text).items():
        modules = {name: ModuleResult(**one) for name, one in kept["modules"].items()}
        build = Build(*kept["build"].split())
        found[release] = ReleaseRun(build, kept["nixl"], modules)
    return found


def text_of(runs: Mapping[str, ReleaseRun]) -> str:
    """Return runs as TOML."""
    parts = [HEAD]
    for release, run in sorted(runs.items()):
        parts.append(f'\n["{release}"]\nbuild = "{" ".join(run.build)}"\nnixl = "{run.nixl}"\n')
        for name, result in sorted(run.modules.items()):
            reasons = (f"{json.dumps(why)} = {count}" for why, count in sorted(result.skipped.items()))
            parts.append(f'\n["{release}".modules.{name}]\ncommit = "{result.commit}"\n')
            parts.append(f"passed = {result.passed}\nfailed = {result.failed}\n")
            parts.append(f"skipped = {{{', '.join(reasons)}}}\n")
    return "".join(parts)
