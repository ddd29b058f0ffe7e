"""What the first contact with a GPU node shows. `__main__` runs it, on nodes that it makes."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from kvxferd.tooling.child_process import ChildProcess
from tests.proofs.cuda_stub.plain_read import SIZE_BYTES, PlainMemory
from tests.support.device_daemon import daemon
from tests.support.doctor_harness import examine
from tests.support.nodes.daemon import Daemon
from tests.support.nodes.fleet import Fleet
from tests.support.nodes.requests import publish, pull_and_check, rank_shown, spec_of

pytestmark = pytest.mark.gpu


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the stand-in logs of all processes that are started from now on."""
    path = tmp_path / "cuda.log"
    path.touch()
    monkeypatch.setenv("CUDA_STUB_LOG", str(path))
    return path


def pull_a_request(fleet: Fleet, node: Daemon, layout: str = "HND") -> None:
    """Have two engines of device memory at that daemon, and one read from the other."""
    store = {"driver": "cuda"}
    sources = fleet.engine(node, spec_of("prefill"), store=store)
    sinks = fleet.engine(node, spec_of("decode"), store=store, layout=layout)
    pull_and_check(sinks, publish(sources, 1), 1)


def test_doctor_reads_over_tcp_and_shows_ucxs_settings() -> None:
    """NIXL makes no agent beside a GPU where UCX_TLS leaves CUDA out."""
    given = {"UCX_MEMTYPE_CACHE": "y"}
    found = examine("--check", "tcp", "--check", "gpu_direct", environment=given)
    assert found.of("tcp")["verdict"] == "ok"
    assert found.status == 0
    defaults = "UCX_CUDA_IPC_ENABLE_GET_ZCOPY=on (default), UCX_CUDA_IPC_CACHE=n (default)"
    assert found.of("ucx settings")["found"] == f"{defaults}, UCX_MEMTYPE_CACHE=y (set here)"


def test_memory_of_cudamalloc_is_read_by_cuda_ipc_with_nvlinks_and_without(log: Path) -> None:
    """By TCP it would be thousands of copies of 8 KiB, none of which is inside the GPU.

    A source that is killed leaves nothing on the device, though its reader lives.
    """
    source, reader = (
        ChildProcess(partial(PlainMemory, f"{role}/1"), log.with_name(role)) for role in ("source", "reader")
    )
    try:
        assert reader.call(PlainMemory.reads, *source.call(PlainMemory.fill))
        source.kill()
        assert reader.call(PlainMemory.drop_source) >= SIZE_BYTES, "beside what it had of its own"
    finally:  # the libraries' destructors could hang, and are not needed
        source.kill()
        reader.kill()
    assert f"device to device: {SIZE_BYTES}" in log.read_text()


def test_a_gpu_that_is_read_over_tcp_alone_is_staged(fleet: Fleet) -> None:
    """Of exported memory UCX's wheels know no other way inside a node: 0.13 instead of 5 GB/s on an H200."""
    node = daemon(fleet, "node", "cuda", placement="auto")
    pull_a_request(fleet, node, layout="NHD")
    placement = rank_shown(node, "prefill")["placement"]
    assert placement["kind"] == "staged"
    assert "over TCP" in placement["why"]


@pytest.mark.parametrize("placement", ["direct", "staged"])
def test_no_host_memory_is_registered_with_the_gpu(
    fleet: Fleet, log: Path, monkeypatch: pytest.MonkeyPatch, placement: str
) -> None:
    """UCX does that where a device is current, and where the driver refuses, refuses the memory."""
    monkeypatch.setenv("CUDA_STUB_HOST_REGISTRATION", "0")
    pull_a_request(fleet, daemon(fleet, "node", "cuda", placement))
    assert "host memory registered" not in log.read_text()


def test_memory_whose_mapping_ucx_has_not_seen_is_read_directly(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NIXL refuses memory that UCX takes for host memory, and then it is staged."""
    monkeypatch.setenv("CUDA_STUB_HOOKED_ADDRESSES", "0")
    node = daemon(fleet, "node", "cuda")
    pull_a_request(fleet, node)
    placements = [rank_shown(node, name)["placement"] for name in ("prefill", "decode")]
    assert [one["kind"] for one in placements] == ["direct", "direct"], placements
