"""UCX's settings on a node with an NVIDIA GPU, over directories that look like sysfs's."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvxferd.mover import ucx_settings
from kvxferd.mover.ucx_settings import (
    GPU_DEFAULTS,
    describe_gpu_settings,
    has_nvidia_gpu,
    set_gpu_defaults,
    tls_with_cuda,
)

NVIDIA, MELLANOX, INTEL = "0x10de", "0x15b3", "0x8086"
VGA, CONTROLLER_3D, BRIDGE, NETWORK = "0x030000", "0x030200", "0x068000", "0x020000"


@pytest.fixture
def bus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(ucx_settings, "_PCI_DEVICES", tmp_path)
    return tmp_path


def plug(bus: Path, vendor: str, kind: str) -> None:
    device = bus / f"0000:{len(list(bus.iterdir())):02x}:00.0"
    device.mkdir()
    (device / "vendor").write_text(vendor + "\n")
    (device / "class").write_text(kind + "\n")


@pytest.mark.parametrize(
    ("devices", "want"),
    [
        ([], False),
        ([(MELLANOX, NETWORK), (NVIDIA, CONTROLLER_3D)], True),
        ([(NVIDIA, VGA)], True),
        ([(NVIDIA, BRIDGE)], False),  # an NVSwitch
        ([(INTEL, VGA)], False),
    ],
)
def test_a_gpu_is_known_by_vendor_and_class(bus: Path, devices: list[tuple[str, str]], want: bool) -> None:
    for device in devices:
        plug(bus, *device)
    (bus / "not-a-device").mkdir()
    assert has_nvidia_gpu() is want
    assert tls_with_cuda("tcp,self") == ("tcp,self,cuda_copy" if want else "tcp,self")
    environ: dict[str, str] = {}
    set_gpu_defaults(environ)
    assert environ == (GPU_DEFAULTS if want else {})


def test_the_operators_value_stays(bus: Path) -> None:
    plug(bus, NVIDIA, CONTROLLER_3D)
    given = {"UCX_MEMTYPE_CACHE": "try"}
    assert list(describe_gpu_settings(given)) == [
        "UCX_CUDA_IPC_ENABLE_GET_ZCOPY=on (default)",
        "UCX_CUDA_IPC_CACHE=n (default)",
        "UCX_MEMTYPE_CACHE=try (set here)",
    ]
    set_gpu_defaults(given)
    assert given == GPU_DEFAULTS | {"UCX_MEMTYPE_CACHE": "try"}
