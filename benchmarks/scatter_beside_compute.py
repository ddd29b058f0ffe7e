"""Measures what a mover's work on a GPU and an engine's matrix products cost each other there.

Each runs alone, then beside the products, in a process of its own, as a mover and its engine do. It needs
torch with CUDA: `python benchmarks/scatter_beside_compute.py`.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

RUN_S = 3.0
SIZE = 8192  # of the square bfloat16 matrices


def matrix_products() -> float:
    """Multiply for a while, and return TFLOP/s."""
    import torch

    left, right = (torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for _ in range(5):
        left @ right
    torch.cuda.synchronize()
    _wait_for_start()
    began, num = time.perf_counter(), 0
    while time.perf_counter() < began + RUN_S:
        for _ in range(4):
            left @ right
        torch.cuda.synchronize()
        num += 4
    return 2 * SIZE**3 * num / (time.perf_counter() - began) / 1e12


def scatters(num_chunks: int) -> float:
    """Scatter chunks of two heads into blocks that lie anywhere, some at once, and return GB/s."""
    from scatter_trial import REGION, fill_of

    from kvxferd.doctor.gpu_placements import TrialDevice
    from kvxferd.memory.driver_registry import open_driver
    from kvxferd.mover.chunks.device_scatter import DeviceScatterer
    from kvxferd.wire.common import RegionAddress
    from kvxferd.wire.limits import CHUNK_BYTES

    driver = open_driver()
    device = TrialDevice(driver, driver.devices()[0].uuid)
    fill, size = fill_of(2, is_scattered=True)
    region = RegionAddress(REGION, device.allocate(size, plain=False), size, device.ordinal, driver.mem_type)
    scatterer = DeviceScatterer(driver, device.uuid, [region], None)
    chunks = [scatterer.make_chunk(CHUNK_BYTES) for _ in range(num_chunks)]
    _wait_for_start()
    began, num_bytes = time.perf_counter(), 0
    while time.perf_counter() < began + RUN_S:
        jobs = [scatterer.start_fill(fill, chunk) for chunk in chunks]
        while not all(job.is_over for job in jobs):
            scatterer.step()
        num_bytes += fill.num_bytes * num_chunks
    if any(job.error is not None for job in jobs):
        raise SystemExit("a scatter has failed")
    return num_bytes / (time.perf_counter() - began) / 1e9


def copies(kind: str) -> float:
    """Copy 4 MiB after 4 MiB by the driver, inside the GPU or to pinned memory, and return GB/s."""
    import torch

    size = 4 << 20
    source = torch.empty(size, device="cuda", dtype=torch.uint8)
    target = (
        torch.empty(size, dtype=torch.uint8, pin_memory=True) if kind == "host" else torch.empty_like(source)
    )
    torch.cuda.synchronize()
    _wait_for_start()
    began, num_bytes = time.perf_counter(), 0
    while time.perf_counter() < began + RUN_S:
        for _ in range(4):
            target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        num_bytes += 4 * size
    return num_bytes / (time.perf_counter() - began) / 1e9


PRODUCTS = "matrix products, TFLOP/s"
WORK: dict[str, Callable[[], float]] = {
    PRODUCTS: matrix_products,
    "scatters, one chunk at once, GB/s": partial(scatters, 1),
    "scatters, four chunks at once, GB/s": partial(scatters, 4),
    "scatters, sixteen chunks at once, GB/s": partial(scatters, 16),
    "copies inside the GPU, four at once, GB/s": partial(copies, "device"),
    "copies to pinned memory, four at once, GB/s": partial(copies, "host"),
}


def _wait_for_start() -> None:
    print("ready", flush=True)
    sys.stdin.readline()


def rates_of(names: list[str]) -> list[float]:
    """Start each work in its process, let all begin at once, and return their rates."""
    command = [sys.executable, __file__]
    running = [
        subprocess.Popen([*command, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for name in names
    ]
    for process in running:
        assert process.stdout is not None
        process.stdout.readline()
    for process in running:
        assert process.stdin is not None
        process.stdin.write("begin\n")
        process.stdin.flush()
    return [float(process.communicate()[0]) for process in running]


def main() -> None:
    """Run the work that is named, or all of it alone and beside the products."""
    if len(sys.argv) > 1:
        print(WORK[sys.argv[1]]())
        return
    (products_alone,) = rates_of([PRODUCTS])
    print(f"{PRODUCTS}: {products_alone:.3g} alone")
    for name in list(WORK)[1:]:
        (alone,) = rates_of([name])
        products, beside = rates_of([PRODUCTS, name])
        print(
            f"{name}: {alone:.3g} alone, {beside:.3g} beside the products, which keep"
            f" {products / products_alone:.2f} of their rate"
        )


if __name__ == "__main__":
    main()
