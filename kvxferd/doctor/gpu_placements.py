"""Whether each placement of GPU memory works, and how fast, each with its own daemon.

A trial starts a daemon and registers two engines, whose caches are on the device, pulls from one to the
other, and checks every byte. It runs in a process that may crash or hang, and the source in one of its own:
inside one process UCX reads no memory as it does between two.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvxferd import client
from kvxferd.doctor.isolated import call_isolated, isolated
from kvxferd.doctor.report import CheckContext, Finding, Verdict, fail, ok
from kvxferd.errors import Code, KvxferdError
from kvxferd.ids import RegionId
from kvxferd.layout import EngineSpec, RankLayout
from kvxferd.layout.presets import LayerKind, ModelFacts, deploy, key_and_value
from kvxferd.memory.device import DeviceMemory, ResidentMemory
from kvxferd.memory.device_pool import DevicePool
from kvxferd.memory.driver import DRIVER_VARIABLE, Driver
from kvxferd.memory.driver_registry import open_driver
from kvxferd.tooling.child_process import ChildProcess
from kvxferd.tooling.content import Bytes, RequestBlocks
from kvxferd.tooling.daemon_process import DaemonProcess
from kvxferd.tooling.engine_process import EngineRank

PLACEMENTS = ("direct", "resident", "staged")
TRIAL_TIMEOUT_S = 120.0  # a daemon, its first GPU context and some pulls

NUM_PULLS = 4  # the first one connects
# 256 MiB in all: enough to measure a link's speed.
MODEL = ModelFacts("doctor", 8, (LayerKind.FULL,) * 8, key_and_value(8, 128))
BLOCK_TOKENS, NUM_BLOCKS, BLOCK_BYTES = 16, 512, 512 << 10
MAX_SHARE = 64  # a cache has at most this part of the device: a slice of a card (MIG) is small


class TrialSpeed(NamedTuple):
    """How fast a placement that works is."""

    gigabytes_per_s: float
    lanes: str = ""


def try_placements(node: CheckContext, gpus: Iterable[Finding]) -> Iterator[Finding]:
    """Yield whether each placement works on the first GPU of these findings; nothing if there is none."""
    devices = [gpu.facts["uuid"] for gpu in gpus if gpu.verdict is not Verdict.FAIL and "uuid" in gpu.facts]
    for placement in PLACEMENTS if devices else ():
        try:
            with isolated(object, node.environment) as child:
                where = child.log.parent
                speed, lanes = call_isolated(
                    child, TRIAL_TIMEOUT_S, try_placement, placement, devices[0], where
                )
        except KvxferdError as error:
            found = error.message if error.code is Code.INTERNAL else f"{error.message} [{error.code.value}]"
            yield fail(placement, found, "see docs/how-to/gpu-nodes.md", essential=True)
            continue
        over = f" over {lanes}" if lanes else ""
        yield ok(placement, f"{speed:.3g} GB/s{over}", gigabytes_per_s=speed, lanes=lanes)


class TrialDevice:
    """The device that the memory is on."""

    def __init__(self, driver: Driver, uuid: str) -> None:
        self.driver = driver
        self.uuid = uuid
        self.ordinal = driver.device(uuid).ordinal
        self._pool = DevicePool(uuid, driver)
        with driver.on(uuid):
            self._stream = driver.open_stream()

    def allocate(self, size: int, plain: bool) -> int:
        """Return the address of exportable memory, or, if `plain`, of memory as cudaMalloc makes it.

        It is freed with this process.
        """
        if plain:
            return self.driver.allocate_plain(self.uuid, size)
        return self._pool.allocate(size).address

    def copy(self, to: int, source: int, size: int) -> float:
        """Copy, and return the time in seconds."""
        with self.driver.on(self.uuid):
            began = time.perf_counter()
            self.driver.copy([to], [source], [size], self._stream)
            self.driver.synchronize(self._stream)
            return time.perf_counter() - began

    def write(self, address: int, content: bytes) -> None:
        """Write bytes to device memory."""
        with self.driver.on(self.uuid):
            window = self.driver.allocate_host(len(content))
            ctypes.memmove(window, content, len(content))
            self.copy(address, window, len(content))
            self.driver.free_host(window)

    def read(self, address: int, size: int) -> bytes:
        """Return bytes of device memory."""
        with self.driver.on(self.uuid):
            window = self.driver.allocate_host(size)
            self.copy(window, address, size)
            content = ctypes.string_at(window, size)
            self.driver.free_host(window)
            return content


class TrialStore:
    """A rank's cache on the device; `bytes` is a copy of it."""

    def __init__(self, uuid: str, is_resident: bool, size_bytes: int) -> None:
        self._device = TrialDevice(open_driver(), uuid)
        self._address = self._device.allocate(size_bytes, plain=is_resident)
        self.memory = (
            ResidentMemory(self._address, size_bytes, uuid)
            if is_resident
            else DeviceMemory(self._address, size_bytes, self._device.driver)
        )
        self.bytes: Bytes = np.zeros(size_bytes, dtype=np.uint8)

    def load(self) -> None:
        """Copy the cache into `bytes`."""
        self.bytes[:] = np.frombuffer(self._device.read(self._address, self.bytes.size), dtype=np.uint8)

    def save(self) -> None:
        """Copy `bytes` into the cache."""
        self._device.write(self._address, self.bytes.tobytes())


class TrialRank(EngineRank):
    """A rank whose cache is on the device."""

    def _register(self, spec: EngineSpec) -> client.RankHandle:
        if not isinstance(self.store.memory, ResidentMemory):
            return super()._register(spec)
        from kvxferd import resident

        (region,) = self.layout.regions
        return resident.register(self.client, spec, self.layout, {RegionId(region.region): self.store.memory})


def try_placement(_: object, placement: str, uuid: str, directory: Path) -> TrialSpeed:
    """Return how fast a placement is on the device with that id. Raises KvxferdError with the refusal.

    `placement` is one of `PLACEMENTS`. The daemon is in the directory.
    """
    total_bytes = open_driver().device(uuid).total_bytes
    num_blocks = min(NUM_BLOCKS, total_bytes // MAX_SHARE // BLOCK_BYTES)
    return measure_placement(uuid, placement, num_blocks, directory)


def measure_placement(uuid: str, placement: str, num_blocks: int, directory: Path) -> TrialSpeed:
    """Pull a few times, and return the best speed on the wire. Raises KvxferdError with the refusal."""
    environment = {"KVXFERD_MOVER_ENVIRONMENT": _mover_environment()}
    if placement != "resident":
        environment["KVXFERD_MOVER_PLACEMENT"] = placement
    with ExitStack() as stack:
        daemon = DaemonProcess(directory, environ=environment)
        stack.callback(daemon.stop)
        source = ChildProcess(TrialRank, directory / "source.log")
        stack.callback(source.stop, 0.0)  # destructors of drivers and libraries could hang
        daemon.wait_ready()
        return _pull_and_verify(uuid, placement, num_blocks, daemon, source)


def _mover_environment() -> str:
    name = os.environ.get(DRIVER_VARIABLE, "")
    given = os.environ.get("KVXFERD_MOVER_ENVIRONMENT", "")
    return ",".join(filter(None, [given, name and f"{DRIVER_VARIABLE}={name}"]))


def _pull_and_verify(
    uuid: str, placement: str, num_blocks: int, daemon: DaemonProcess, source: ChildProcess[TrialRank]
) -> TrialSpeed:
    ids = {"full": np.arange(num_blocks, dtype=np.int32)}
    request = RequestBlocks(1, ids, num_blocks * BLOCK_TOKENS)
    make_store = partial(TrialStore, uuid, placement == "resident")
    with closing(TrialRank()) as sink:
        source.call(TrialRank.register, daemon.worker_socket, *_only_rank("source", num_blocks), make_store)
        sink.register(daemon.worker_socket, *_only_rank("sink", num_blocks), make_store)
        source.call(TrialRank.write, request)
        pulls = []
        for number in range(NUM_PULLS):
            ref = source.call(TrialRank.publish, f"doctor-{number}", request)
            source.call(TrialRank.ready, f"doctor-{number}")
            sink.store.bytes[:] = 0
            sink.store.save()
            pulls.append(sink.pull(ref, request))
            if sink.check(request).wrong_items:
                raise KvxferdError("other bytes were delivered than were sent")
        found = _reported_placement(daemon)
    if found["kind"] != placement:
        raise KvxferdError(
            f"the daemon took {found['kind']} in its place: {found['why'] or 'it does not say why'}"
        )
    speed = max(pull.bytes / pull.wire_s for pull in pulls) / 1e9
    # A resident mover's proof reads inside its own process, as no pull does.
    lanes = "" if placement == "resident" else found["lanes"]
    return TrialSpeed(speed, lanes)


def _only_rank(name: str, num_blocks: int) -> tuple[EngineSpec, RankLayout]:
    ranks = deploy(MODEL, block_tokens=BLOCK_TOKENS, num_blocks=num_blocks, engine_id=f"doctor-{name}")
    ((spec, layout),) = ranks.values()
    return spec, layout


def _reported_placement(daemon: DaemonProcess) -> dict[str, Any]:
    engines = daemon.control.get("/v1/engines")["engines"]
    return next(rank["placement"] for engine in engines for rank in engine["ranks"] if rank["placement"])
