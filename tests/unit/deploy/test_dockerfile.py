"""The Dockerfile, read as an engine reads it: no engine is needed to see these."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

import pytest

from deploy.image.build import VARIANTS
from kvxferd.config import SETTINGS

ROOT = Path(__file__).parents[3]
LOCK = ROOT / "constraints.txt"
TARGETS = ("cpu", "gpu")


class Instruction(NamedTuple):
    word: str
    rest: str


class Stage(NamedTuple):
    name: str
    base: str
    body: list[Instruction]


def instructions() -> list[Instruction]:
    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [
        Instruction(word, " ".join(rest.split()))
        for word, _, rest in (line.partition(" ") for line in joined.splitlines() if line)
    ]


def stages() -> dict[str, Stage]:
    found: dict[str, Stage] = {}
    for instruction in instructions():
        if instruction.word == "FROM":
            base, _, name = instruction.rest.partition(" AS ")
            found[name] = Stage(name, base, [])
        elif found:
            found[list(found)[-1]].body.append(instruction)
    return found


def lineage(target: str) -> list[Stage]:
    """Return the stage and those it continues, its own last."""
    stage = stages()[target]
    return [*(lineage(stage.base) if stage.base in stages() else []), stage]


def all_of(target: str, word: str) -> list[str]:
    return [one.rest for stage in lineage(target) for one in stage.body if one.word == word]


def environment_of(target: str) -> dict[str, str]:
    return dict(text.split("=", 1) for text in all_of(target, "ENV"))


def locked(path: Path) -> dict[str, str]:
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)
    return dict(line.split("==") for line in lines)


def test_both_variants_are_targets_and_the_plain_build_is_the_one_for_host_memory() -> None:
    assert list(stages())[-1] == "cpu"
    assert {VARIANTS[variant][1] for variant in VARIANTS} == set(TARGETS) <= set(stages())


@pytest.mark.parametrize("target", TARGETS)
def test_the_base_is_one_argument_for_every_stage(target: str) -> None:
    before = list(takewhile(lambda one: one.word != "FROM", instructions()))
    (argument,) = [one.rest for one in before if one.word == "ARG"]
    assert argument.startswith("BASE_IMAGE=")
    roots = {lineage(name)[0].base for name in stages()}
    # The user's entry and the loader's cache are copied between stages, and must suit both.
    assert roots == {"${BASE_IMAGE}"}
    assert lineage(target)[0].name == "runtime"


@pytest.mark.parametrize("target", TARGETS)
def test_it_runs_as_a_user_by_number(target: str) -> None:
    (user,) = all_of(target, "USER")
    assert user == "${UID}:${UID}"
    defaults = {text.split("=")[1] for text in all_of(target, "ARG") if text.startswith("UID=")}
    assert defaults == {"10001"}
    # The entry is made in another stage: its default is the same.
    assert "UID=10001" in all_of("build-cpu", "ARG")


@pytest.mark.parametrize("target", TARGETS)
def test_no_command_runs_in_what_is_shipped(target: str) -> None:
    assert all_of(target, "RUN") == []
    assert all_of(target, "ADD") == []


@pytest.mark.parametrize("target", TARGETS)
def test_it_serves(target: str) -> None:
    assert all_of(target, "ENTRYPOINT") == ['["kvxferd"]']
    assert all_of(target, "CMD") == ['["serve"]']
    # A volume below the run directory would hide the worker socket from a host that mounts the directory.
    assert all_of(target, "VOLUME") == []
    variables = {setting.variable for setting in SETTINGS.values()}
    assert {name for name in environment_of(target) if name.startswith("KVXFERD_")} <= variables


def test_gpus_are_asked_for_in_the_gpu_variant_alone() -> None:
    assert environment_of("gpu")["NVIDIA_VISIBLE_DEVICES"] == "all"
    capabilities = environment_of("gpu")["NVIDIA_DRIVER_CAPABILITIES"].split(",")
    assert sorted(capabilities) == [
        "compute",
        "utility",
    ]  # libcuda, and NVML, which UCX's CUDA part is linked with
    assert not [name for name in environment_of("cpu") if name.startswith("NVIDIA_")]


def test_no_install_can_bring_torch() -> None:
    installs = [run for run in all_of("build-gpu", "RUN") if "install " in run and "PIP" in run]
    assert len(installs) == 3
    for install in installs:
        assert "torch" not in install
        assert "-c constraints.txt '.[daemon]'" in install or "--no-deps" in install
    (nixl,) = [install for install in installs if "nixl" in install]
    assert '--no-deps -c constraints.txt nixl "nixl-cu${CUDA}"' in nixl


def test_every_install_gets_the_settings_of_pip_as_a_secret() -> None:
    for run in all_of("build-gpu", "RUN"):
        assert ("--mount=type=secret,id=pip.conf,target=/etc/pip.conf" in run) == ("${PIP} install" in run)
    assert not [
        text for stage in stages().values() for word, text in stage.body if word == "ARG" and "INDEX" in text
    ]


@pytest.mark.parametrize("cuda", ["12", "13"])
def test_what_a_cuda_version_adds_is_locked(cuda: str) -> None:
    found = locked(ROOT / "deploy" / "image" / f"cuda{cuda}.txt")
    assert found["cuda-python"].split(".")[0] == cuda
    assert found["cuda-bindings"].split(".")[0] == cuda
    (runtime,) = [name for name in found if name.startswith("nvidia-cuda-runtime")]
    assert found[runtime].split(".")[0] == cuda
    shared = locked(LOCK)
    assert f"nixl-cu{cuda}" in shared
    if cuda == "13":  # what the project is tested with
        assert {name: shared[name] for name in found if name in shared}.items() <= found.items()
        assert {name for name in shared if name.startswith("cuda-")} <= set(found)


def test_what_is_copied_is_sent_to_the_engine_and_nothing_secret_is() -> None:
    lines = (ROOT / ".dockerignore").read_text().split()
    sent = [line[1:] for line in lines if line.startswith("!")]
    copied = [
        source.replace("${CUDA}", "12")
        for stage in stages().values()
        for word, text in stage.body
        if word == "COPY" and "--from=" not in text
        for source in text.split()[:-1]
    ]
    assert lines[0] == "*"
    assert [source for source in copied if not any(fnmatch(source, pattern) for pattern in sent)] == []
    assert [source for source in copied if not (ROOT / source).exists()] == []
    assert not [pattern for pattern in sent if fnmatch("pip.conf", pattern) or fnmatch(".git", pattern)]
