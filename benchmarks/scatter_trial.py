"""Measures scatters in a GPU: `python -m benchmarks.scatter_trial [DRIVER]`.

A chunk of blocks with heads first is copied into blocks with tokens first and twice as many heads, as a
covering read does it, and every byte of them is compared. Prints a row for each number of heads; exit status
1 where a byte is wrong, 2 where there is no GPU that can be used.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvxferd.doctor.gpu_placements import TrialDevice
from kvxferd.errors import KvxferdError
from kvxferd.ids import RegionId
from kvxferd.memory.driver_registry import open_driver
from kvxferd.mover.chunks.covering import ChunkFill, PlacedStretches, scatter_pieces
from kvxferd.mover.chunks.device_scatter import DeviceScatterer
from kvxferd.mover.transport.copy_probe import probe_copy_rows
from kvxferd.plan.covering import Stretches
from kvxferd.plan.stretches import Copies, StretchForm
from kvxferd.tooling.exit_codes import EXIT_FAILED, EXIT_OK
from kvxferd.wire.common import RegionAddress
from kvxferd.wire.limits import CHUNK_BYTES

REGION = RegionId("kv")
TOKENS, HEAD_BYTES = 16, 256  # 128 numbers of two bytes
NUM_ROUNDS = 5
LIMIT_S = 60.0  # for one scatter
EXIT_NO_DRIVER = 2


class ScatterSpeed(NamedTuple):
    """One scatter of a chunk."""

    is_right: bool
    num_bytes: int
    best_s: float


def fill_of(heads: int, is_scattered: bool) -> tuple[ChunkFill, int]:
    """Return what is read into a chunk, and the size of the blocks together."""
    head, token = (index.ravel() for index in np.indices((heads, TOKENS), dtype=np.int64))
    image = (head * TOKENS + token) * HEAD_BYTES
    form = StretchForm(
        heads * TOKENS * HEAD_BYTES,
        1,
        (Copies(HEAD_BYTES, image, (token * 2 * heads + head) * HEAD_BYTES, None),),
    )
    num = CHUNK_BYTES // form.size_bytes
    blocks = np.random.default_rng(1).permutation(num) if is_scattered else np.arange(num)
    images = np.arange(num, dtype=np.int64) * form.size_bytes
    stretches = Stretches(
        form,
        REGION,
        images,
        (blocks.astype(np.int64) * 2 * form.size_bytes)[:, None],
    )
    none = np.empty(0, dtype=np.int64)
    fill = ChunkFill(none, none, none, (PlacedStretches(stretches, images),), stretches.num_bytes)
    return fill, 2 * num * form.size_bytes


def measure(device: TrialDevice, heads: int, is_scattered: bool) -> ScatterSpeed:
    """Scatter a chunk some times, and return the best time. Raises KvxferdError."""
    fill, size = fill_of(heads, is_scattered)
    address = device.allocate(size, plain=False)
    region = RegionAddress(REGION, address, size, device.ordinal, device.driver.mem_type)
    scatterer = DeviceScatterer(device.driver, device.uuid, [region], None)
    chunk = scatterer.make_chunk(CHUNK_BYTES)
    content = np.random.default_rng(2).integers(0, 256, CHUNK_BYTES, dtype=np.uint8)
    device.write(chunk.address, content.tobytes())
    wanted = np.zeros(size, dtype=np.uint8)
    for piece in scatter_pieces(fill, content, {REGION: wanted}):
        piece()
    best = float("inf")
    for _ in range(NUM_ROUNDS):
        device.write(address, bytes(size))
        began = time.perf_counter()
        job = scatterer.start_fill(fill, chunk)
        while not job.is_over:
            scatterer.step()
            if time.perf_counter() > began + LIMIT_S:
                raise KvxferdError(f"a scatter has not ended after {LIMIT_S:g} s")
        best = min(best, time.perf_counter() - began)
        if job.error is not None:
            raise job.error
    found: npt.NDArray[np.uint8] = np.frombuffer(device.read(address, size), dtype=np.uint8)
    scatterer.close()
    return ScatterSpeed(bool((found == wanted).all()), fill.num_bytes, best)


def rows(device: TrialDevice) -> Iterator[tuple[str, ScatterSpeed]]:
    """Yield each case, and its speed."""
    for heads in (1, 2, 8):
        for is_scattered in (False, True):
            case = f"{heads} heads, blocks {'scattered' if is_scattered else 'in a row'}"
            yield case, measure(device, heads, is_scattered)


def main() -> int:
    """Measure, and return the exit status."""
    try:
        driver = open_driver(*sys.argv[1:2])
        device = TrialDevice(driver, driver.devices()[0].uuid)
    except KvxferdError as error:
        print(f"scatters in the GPU were not measured: {error.message}", file=sys.stderr)
        return EXIT_NO_DRIVER
    try:
        return EXIT_OK if _are_right(device) else EXIT_FAILED
    except KvxferdError as error:
        print(f"scatters in the GPU do not work: {error.message}")
        return EXIT_FAILED


def _are_right(device: TrialDevice) -> bool:
    driver = device.driver
    why = probe_copy_rows(driver, device.uuid)
    print(f"copies of rows: {why or 'right'}")
    source, target = (device.allocate(CHUNK_BYTES, plain=False) for _ in range(2))
    plain_s = min(device.copy(target, source, CHUNK_BYTES) for _ in range(NUM_ROUNDS))
    print(f"a plain copy of 4 MiB: {CHUNK_BYTES / plain_s / 1e9:.3g} GB/s")
    is_right = not why
    for case, speed in rows(device):
        is_right &= speed.is_right
        gigabytes_per_s = speed.num_bytes / speed.best_s / 1e9
        verdict = "right" if speed.is_right else "WRONG BYTES"
        print(
            f"a scatter of 4 MiB, {case}: {gigabytes_per_s:.3g} GB/s, {1e6 * speed.best_s:.0f} us, {verdict}"
        )
    return is_right


if __name__ == "__main__":
    sys.exit(main())
