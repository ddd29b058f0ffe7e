"""What an image is built with: what CUDA adds is locked, and what of this host reaches a build."""

from __future__ import annotations

import re
import tarfile
from pathlib import Path

import pytest

from deploy.image import build
from deploy.image.build import Mount, build_command, mounts_of, package_sources

ROOT = Path(__file__).parents[3]


def locked(path: Path) -> dict[str, str]:
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)
    return dict(line.split("==") for line in lines)


@pytest.mark.parametrize("cuda", ["12", "13"])
def test_what_a_cuda_version_adds_is_locked(cuda: str) -> None:
    found = locked(ROOT / "deploy" / "image" / f"cuda{cuda}.txt")
    assert found["cuda-python"].split(".")[0] == cuda
    assert found["cuda-bindings"].split(".")[0] == cuda
    (runtime,) = [name for name in found if name.startswith("nvidia-cuda-runtime")]
    assert found[runtime].split(".")[0] == cuda
    shared = locked(ROOT / "constraints.txt")
    assert f"nixl-cu{cuda}" in shared
    if cuda == "13":  # what the project is tested with
        assert {name: shared[name] for name in found if name in shared}.items() <= found.items()
        assert {name for name in shared if name.startswith("cuda-")} <= set(found)


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


def test_the_command_names_the_settings_file_and_not_what_it_holds(tmp_path: Path) -> None:
    secret = tmp_path / "pip.conf"
    command = build_command("cuda12", "base:1", "name:2", secret, [Mount(Path("/wheels"))])
    assert command[:2] == ["podman", "build"]
    assert f"id=pip.conf,src={secret}" in command
    assert command[5:9] == ["--target", "gpu", "--build-arg", "CUDA=12"]
    assert {"BASE_IMAGE=base:1", "--volume=/wheels:/wheels:ro", "name:2"} <= set(command)


def test_a_base_is_packed_without_the_host_s_names(tmp_path: Path) -> None:
    folder = tmp_path / "base"
    hosts = ("etc/hostname", "etc/resolv.conf", "var/log/a.log", "usr/share/doc/b")
    for name in (*hosts, "etc/passwd", "usr/bin/c"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    build._pack(folder, tmp_path / "base.tar")
    with tarfile.open(tmp_path / "base.tar") as tar:
        files = {member.name.removeprefix("./") for member in tar if member.isfile()}
        folders = {member.name.removeprefix("./") for member in tar if member.isdir()}
    assert files == {"etc/passwd", "usr/bin/c"}
    assert {"usr/share/doc", "var/log"} <= folders
    assert not (tmp_path / "base.begun").exists()
