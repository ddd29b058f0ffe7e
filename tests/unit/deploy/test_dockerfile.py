"""The Dockerfile, read as an engine reads it: no engine is needed to see these."""

from __future__ import annotations

import configparser
import re
import subprocess
import sys
import tarfile
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.image import build
from deploy.image.build import Mount, build_command, mounts_of, package_sources, pip_conf

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


@pytest.mark.parametrize("target", TARGETS)
def test_it_runs_as_a_user_by_number(target: str) -> None:
    (user,) = all_of(target, "USER")
    assert user == "${UID}:${UID}"
    defaults = {text.split("=")[1] for text in all_of(target, "ARG") if text.startswith("UID=")}
    assert defaults == {"10001"}
    # The entry is made in another stage: its default is the same.
    assert "UID=10001" in all_of("build-cpu", "ARG")


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


# --- deploy/image/build.py: what of a host's pip reaches a build, and how


def test_settings_that_say_where_packages_come_from_are_taken_and_others_are_not() -> None:
    listed = [
        ":env:.disable-pip-version-check='1'",
        ":env:.find-links='/wheels'",
        "global.constraint='/etc/xdg/pip/constraints.txt'",
        "global.extra-index-url='file:///index/simple https://user:word@index.example/simple'",
        "global.find-links='/older'",
        "download.index-url='https://other.example'",
        "install.timeout='5'",
    ]
    assert package_sources(listed) == {
        "extra-index-url": "file:///index/simple https://user:word@index.example/simple",
        "find-links": "/wheels",
        "timeout": "5",
    }


@pytest.mark.parametrize("first", [0, 1, 2])
def test_a_variable_goes_before_a_file_in_any_order(first: int) -> None:
    listed = ["global.index-url='https://a'", "install.index-url='https://b'", ":env:.index-url='https://c'"]
    assert package_sources(listed[first:] + listed[:first]) == {"index-url": "https://c"}


@pytest.mark.process
def test_what_pip_prints_is_what_is_read(tmp_path: Path) -> None:
    conf = tmp_path / "pip.conf"
    conf.write_text(
        "[global]\nindex-url = https://index.example/simple\nextra-index-url =\n    https://a/%40b\n    file:///c\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--isolated", "config", "list"],
        env={"PIP_CONFIG_FILE": str(conf), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    if not done.stdout:
        pytest.skip("this pip reads no file that PIP_CONFIG_FILE names")
    found = package_sources(done.stdout.splitlines())
    assert found["index-url"] == "https://index.example/simple"
    assert found["extra-index-url"].split() == ["https://a/%40b", "file:///c"]


VALUES = st.text(st.characters(codec="ascii", categories=("L", "N", "P")), min_size=1)


@given(st.dictionaries(st.sampled_from(build.SOURCES), VALUES))
def test_a_file_of_settings_reads_as_they_were(sources: dict[str, str]) -> None:
    parser = configparser.RawConfigParser()
    parser.read_string(pip_conf(sources))
    assert dict(parser["global"]) == sources


def test_an_index_is_mounted_with_the_folder_that_its_links_lead_to(tmp_path: Path) -> None:
    for name in ("index/simple", "index/files", "wheels", "spaced index/simple"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "ca.crt").touch()
    sources = {
        "cert": f"{tmp_path}/ca.crt",
        "index-url": "https://index.example/simple",
        "extra-index-url": f"file://{tmp_path}/index/simple file://{tmp_path}/spaced%20index/simple file:///not/there",
        "find-links": f"{tmp_path}/wheels https://wheels.example {tmp_path}/index/files",
        "trusted-host": "index.example",
    }
    names = ("ca.crt", "index", "spaced index", "wheels")
    assert mounts_of(sources) == [Mount(tmp_path / name) for name in names]
    assert mounts_of(sources)[0].flag() == f"--volume={tmp_path}/ca.crt:{tmp_path}/ca.crt:ro"


def test_a_host_s_root_is_not_mounted() -> None:
    with pytest.raises(SystemExit, match="cannot mount /"):
        mounts_of({"index-url": "file:///usr"})


def test_the_command_names_the_settings_file_and_not_what_it_holds(tmp_path: Path) -> None:
    secret = tmp_path / "pip.conf"
    command = build_command("cuda12", "base:1", "name:2", secret, [Mount(Path("/wheels"))])
    assert command[:2] == ["podman", "build"]
    assert f"id=pip.conf,src={secret}" in command
    assert command[5:9] == ["--target", "gpu", "--build-arg", "CUDA=12"]
    assert {"BASE_IMAGE=base:1", "--volume=/wheels:/wheels:ro", "name:2"} <= set(command)


def test_a_base_is_packed_without_the_host_s_names(tmp_path: Path) -> None:
    folder = tmp_path / "base"
    for name in (
        "etc/hostname",
        "etc/resolv.conf",
        "etc/passwd",
        "var/log/a.log",
        "usr/share/doc/b",
        "usr/bin/c",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    build._pack(folder, tmp_path / "base.tar")
    with tarfile.open(tmp_path / "base.tar") as tar:
        files = {member.name.removeprefix("./") for member in tar if member.isfile()}
        folders = {member.name.removeprefix("./") for member in tar if member.isdir()}
    assert files == {"etc/passwd", "usr/bin/c"}
    assert {"usr/share/doc", "var/log"} <= folders
    assert not (tmp_path / "base.begun").exists()
