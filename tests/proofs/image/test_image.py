"""The image as it was built: what is in it, and what its containers do."""

from __future__ import annotations

import json
import tarfile
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from deploy.image import build
from tests.support.containers import SHM_SIZE, DaemonContainer, inspect, output, podman
from tests.support.lone_rank import REQUEST, lone_rank, publish
from tests.support.ports import free_port

Start = Callable[..., DaemonContainer]


# --- what is in it


def test_it_runs_kvxferd_as_a_user_by_number(image: str) -> None:
    config = inspect(image)
    uid, gid = (int(text) for text in config["User"].split(":"))
    assert uid == gid != 0
    assert (config["Entrypoint"], config["Cmd"]) == (["kvxferd"], ["serve"])
    # A volume below the run directory would hide the socket from the host that mounts the directory.
    assert not config.get("Volumes")
    script = "import os, pwd; print(os.getuid(), pwd.getpwuid(os.getuid()).pw_dir)"
    assert output(image, "python", "-c", script).split() == [str(uid), "/home/kvxferd"]


FOUND = """
import importlib.util, importlib.metadata, json
names = ("torch", "pip", "nixl_ep", "nixl_cu12", "nixl_cu13", "cuda", "vllm")
found = {name: importlib.util.find_spec(name) is not None for name in names}
if found["cuda"]:
    found["cuda"] = importlib.metadata.version("cuda-bindings").split(".")[0]
print(json.dumps(found))
"""


def test_it_has_one_nixl_and_no_torch(image: str) -> None:
    found = json.loads(output(image, "python", "-c", FOUND))
    assert not [name for name in ("torch", "pip", "nixl_ep", "vllm") if found[name]]
    assert found["nixl_cu12"] != found["nixl_cu13"]
    variables = dict(text.split("=", 1) for text in inspect(image)["Env"])
    if found["cuda"]:
        assert found[f"nixl_cu{found['cuda']}"]
        assert variables["NVIDIA_VISIBLE_DEVICES"] == "all"
        assert variables["NVIDIA_DRIVER_CAPABILITIES"] == "compute,utility"
    else:
        assert not [name for name in variables if name.startswith("NVIDIA_")]


def of_this_host() -> list[bytes]:
    """Return what of pip's settings here names this host's indexes and folders."""
    sources = build.host_sources()
    settings = ("index-url", "extra-index-url", "find-links", "proxy")
    places = " ".join(sources.get(name, "") for name in settings).split()
    words = [text for text in places if urlsplit(text).hostname not in ("pypi.org", "download.pytorch.org")]
    # The bundle of certificates of a host stands where the image's own does.
    mounts = [str(mount.path) for mount in build.mounts_of(sources)]
    words += [path for path in mounts if not path.startswith("/etc/ssl/")]
    return [word.encode() for word in words]


def layers_of(archive: Path) -> Iterator[tuple[str, bytes]]:
    """Yield every file of every layer of a saved image, and its descriptions, with their names."""
    with tarfile.open(archive) as outer:
        for member in outer:
            if not (member.isfile() and (opened := outer.extractfile(member))):
                continue
            if not member.name.endswith(".tar"):
                yield member.name, opened.read()
                continue
            with tarfile.open(fileobj=opened) as layer:
                for one in layer:
                    content = layer.extractfile(one) if one.isfile() else None
                    yield one.name, content.read() if content else one.linkname.encode()


def test_nothing_of_the_host_s_pip_is_in_it(image: str, tmp_path: Path) -> None:
    words = of_this_host()
    archive = tmp_path / "image.tar"
    podman("save", "--format", "docker-archive", "--output", str(archive), image)
    names, holding = set(), []
    for name, text in layers_of(archive):
        names.add("/" + name.removeprefix("./"))
        holding += [(name, word) for word in words if word in text]
    assert "/etc/passwd" in names  # the layers were read
    assert any("/kvxferd/cli/" in name for name in names)
    assert not [name for name in names if name.endswith(("pip.conf", ".netrc", ".pypirc"))]
    assert not [name for name in names for word in words if name.encode().startswith(word)]
    assert holding == []
    history = podman("history", "--no-trunc", "--format", "{{.CreatedBy}} {{.Comment}}", image).encode()
    assert not [word for word in words if word in history]


# --- what its containers do


def test_a_container_serves_and_drains(start: Start) -> None:
    port = free_port()
    daemon = start("one", port)
    for path in ("/healthz", "/readyz", "/metrics"):
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as response:
            assert response.status == 200
    rank = lone_rank(daemon.worker_socket, "prefill")
    engines = daemon.control.get("/v1/status")["node"]["engines"]
    assert [engine["engine_id"] for engine in engines] == ["prefill"]
    rank.close()
    assert daemon.stop() == 0, daemon.log()


@pytest.mark.parametrize(("on_host", "lanes"), [(False, "tcp"), (True, "cma")])
def test_two_containers_move_bytes(start: Start, on_host: bool, lanes: str) -> None:
    near, far = (start(name, on_host=on_host) for name in ("near", "far"))
    source, sink = lone_rank(near.worker_socket, "prefill"), lone_rank(far.worker_socket, "decode")
    try:
        ref = publish(source)
        assert sink.check(REQUEST).wrong_items > 0
        sink.pull(ref, REQUEST)
        assert sink.check(REQUEST).wrong_items == 0
        assert source.check(REQUEST).wrong_items == 0
        assert lanes_of(far) == {lanes}
    finally:
        source.close()
        sink.close()


def lanes_of(daemon: DaemonContainer) -> set[str]:
    """Return what its ranks read others by, as the daemon found it in UCX's log."""
    status = daemon.control.get("/v1/status")
    ranks = [rank for engine in status["node"]["engines"] for rank in engine["ranks"]]
    return {way["lanes"] for rank in ranks for way in rank["lanes"] if way["reach"] != "itself"}


def test_doctor_says_what_it_sees_in_the_container(start: Start) -> None:
    daemon = start("one")
    rank = lone_rank(daemon.worker_socket, "prefill")
    report = json.loads(daemon.run("doctor", "--json"))  # exits 0: nothing that is needed is broken
    rank.close()
    rows = {(row["name"], row["check"]): row for row in report["findings"]}
    assert rows["software", "nixl"]["verdict"] == "ok"
    assert "torch" not in rows["software", "python"]["facts"]["packages"]
    right = (("kernel", "sealed memory"), ("same_node", "same node"), ("tcp", "tcp"), ("answering", "daemon"))
    for row in right:
        assert rows[row]["verdict"] == "ok", rows[row]
    # What a container's engine gives it, seen from within.
    memory = rows["shared_memory", "shared memory"]
    assert SHM_SIZE.upper().removesuffix("M") in memory["found"], memory
    assert rows["gpus", "gpu"]["verdict"] == "no", rows["gpus", "gpu"]


def test_the_demo_moves_and_checks_every_byte_between_layouts_that_differ(image: str) -> None:
    flags = ("--requests", "4", "--tokens", "200", "--layers", "4")
    # 12 movers and what waits in two pools: 58 MiB of /dev/shm.
    said = podman("run", "--rm", "--network=none", f"--shm-size={SHM_SIZE}", image, "demo", *flags)
    assert said.rstrip().endswith("every byte is right")
