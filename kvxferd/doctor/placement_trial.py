"""Tries one placement of GPU memory: `python -m kvxferd.doctor.placement_trial PLACEMENT DEVICE DIRECTORY`.

It starts a daemon and registers two engines of this process, whose caches are on the device, pulls from one
to the other, and checks every byte. Prints one line of JSON.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from array import array
from pathlib import Path
from typing import Any

from kvxferd import client
from kvxferd.doctor.placements import DEVICE_COPY
from kvxferd.errors import KvxferdError
from kvxferd.ids import EngineId, Generation, RegionId
from kvxferd.layout import EngineSpec, RankLayout
from kvxferd.layout.presets import attention_layout
from kvxferd.memory.device import DeviceMemory
from kvxferd.memory.device_pool import DevicePool
from kvxferd.memory.driver import DRIVER_VARIABLE, Driver
from kvxferd.memory.driver_registry import open_driver
from kvxferd.tooling.daemon_process import DaemonProcess
from kvxferd.tooling.event_waiter import EventWaiter

NUM_PULLS = 4  # the first one connects
EVENT_TIMEOUT_S = 30.0
BLOCK_TOKENS = 16
# 256 MiB in all: enough to measure a link's speed.
NUM_HEADS, HEAD_DIM = 8, 128
NUM_BLOCKS = 512
NUM_LAYERS = 8
BLOCK_BYTES = 512 << 10
MAX_SHARE = 64  # a cache has at most this part of the device: a slice of a card (MIG) is small


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


class TrialEngine:
    """One rank, and its memory."""

    def __init__(self, device: TrialDevice, name: str, placement: str, num_blocks: int) -> None:
        self.spec = EngineSpec(
            EngineId(f"doctor-{name}"),
            Generation("1"),
            num_layers=NUM_LAYERS,
            num_kv_heads=NUM_HEADS,
        )
        self.layout: RankLayout = attention_layout(
            spec=self.spec,
            num_blocks=num_blocks,
            num_kv_heads=NUM_HEADS,
            head_dim=HEAD_DIM,
            block_tokens=BLOCK_TOKENS,
        )
        self.size_bytes = self.layout.regions[0].size_bytes
        self.address = device.allocate(self.size_bytes, plain=placement == "resident")
        self._device = device
        self._placement = placement
        self._rank: client.RankHandle | None = None
        self._events: EventWaiter | None = None

    @property
    def rank(self) -> client.RankHandle:
        """The registered rank."""
        assert self._rank is not None
        return self._rank

    def register(self, socket: str) -> None:
        """Register the rank. Raises KvxferdError with the refusal."""
        region = RegionId("kv")
        connection = client.connect(socket)
        if self._placement == "resident":
            from kvxferd import resident
            from kvxferd.memory.device import ResidentMemory

            memory = ResidentMemory(self.address, self.size_bytes, self._device.uuid)
            self._rank = resident.register(connection, self.spec, self.layout, {region: memory})
        else:
            exported = DeviceMemory(self.address, self.size_bytes, self._device.driver)
            self._rank = connection.register(engine=self.spec, layout=self.layout, regions={region: exported})
        self._events = EventWaiter(self._rank)

    def await_event(self, kind: type[client.Event]) -> Any:
        """Return the next event of a kind. Raises KvxferdError if the pull fails or none comes in time."""
        assert self._events is not None
        deadline = time.monotonic() + EVENT_TIMEOUT_S
        while not isinstance(event := self._events.next_event(deadline), kind):
            if isinstance(event, client.Failed):
                raise KvxferdError(f"the pull failed: {event.message} [{event.code}]", event.code)
        return event


def measure_copy(device: TrialDevice, num_blocks: int) -> dict[str, Any]:
    """Return the speed of a plain copy on the device, of the same size as a pull."""
    engines = [TrialEngine(device, name, "direct", num_blocks) for name in ("from", "to")]
    size = engines[0].size_bytes
    best = min(device.copy(engines[1].address, engines[0].address, size) for _ in range(NUM_PULLS))
    return {"gigabytes_per_s": size / best / 1e9}


def measure_placement(
    device: TrialDevice, placement: str, num_blocks: int, directory: Path
) -> dict[str, Any]:
    """Pull a few times, and return the best speed on the wire. Raises KvxferdError with the refusal."""
    environment = {"KVXFERD_MOVER_ENVIRONMENT": _mover_environment()}
    if placement == "staged":
        environment["KVXFERD_MOVER_PLACEMENT"] = "staged"
    daemon = DaemonProcess(directory, environ=environment)
    try:
        daemon.wait_ready()
        return _pull_and_verify(device, placement, num_blocks, daemon)
    except KvxferdError:
        print(daemon.log_tail(), file=sys.stderr)
        raise
    finally:
        daemon.stop()


def _mover_environment() -> str:
    name = os.environ.get(DRIVER_VARIABLE, "")
    given = os.environ.get("KVXFERD_MOVER_ENVIRONMENT", "")
    return ",".join(filter(None, [given, name and f"{DRIVER_VARIABLE}={name}"]))


def _pull_and_verify(
    device: TrialDevice, placement: str, num_blocks: int, daemon: DaemonProcess
) -> dict[str, Any]:
    source, sink = (TrialEngine(device, name, placement, num_blocks) for name in ("source", "sink"))
    content = unique_pages(source.size_bytes)
    device.write(source.address, content)
    for engine in (source, sink):
        engine.register(daemon.worker_socket)
    ids = {"full": client.BlockList(ids=array("i", range(num_blocks)))}
    num_tokens, best = num_blocks * BLOCK_TOKENS, float("inf")
    for number in range(NUM_PULLS):
        device.write(sink.address, bytes(sink.size_bytes))
        ref = source.rank.publish(f"doctor-{number}", ids, num_tokens=num_tokens)
        source.rank.ready(f"doctor-{number}")
        sink.rank.pull(ref.to_json(), ids, num_tokens=num_tokens, deadline_s=EVENT_TIMEOUT_S)
        best = min(best, sink.await_event(client.Delivered).wire_s)
        if device.read(sink.address, sink.size_bytes) != content:
            raise KvxferdError("other bytes were delivered than were sent")
    found = _reported_placement(daemon)
    for engine in (source, sink):
        engine.rank.close()
    if found["kind"] != placement:
        raise KvxferdError(
            f"the daemon took {found['kind']} in its place: {found['why'] or 'it says not why'}"
        )
    return {"gigabytes_per_s": source.size_bytes / best / 1e9, "lanes": found["lanes"]}


def unique_pages(size_bytes: int) -> bytes:
    """Return bytes in which no two pages are equal, so that a misplaced page is found."""
    noise, page = os.urandom(1 << 16), 4096
    pages = (
        number.to_bytes(8, "little") + noise[number * 8 % (1 << 15) :][: page - 8]
        for number in range(-(-size_bytes // page))
    )
    return b"".join(pages)[:size_bytes]


def _reported_placement(daemon: DaemonProcess) -> dict[str, Any]:
    engines = daemon.control.get("/v1/engines")["engines"]
    return next(rank["placement"] for engine in engines for rank in engine["ranks"] if rank["placement"])


def main() -> None:
    """Run the trial. An error prints one line on standard error."""
    placement, uuid, directory = sys.argv[1:]
    try:
        device = TrialDevice(open_driver(), uuid)
        total_bytes = device.driver.device(uuid).total_bytes
        num_blocks = min(NUM_BLOCKS, total_bytes // MAX_SHARE // BLOCK_BYTES)
        if placement == DEVICE_COPY:
            result = measure_copy(device, num_blocks)
        else:
            result = measure_placement(device, placement, num_blocks, Path(directory))
    except KvxferdError as error:
        sys.exit(f"{error.message} [{error.code.value}]")
    print(json.dumps(result), flush=True)
    os._exit(0)  # destructors of drivers and libraries could hang, and are not needed


if __name__ == "__main__":
    main()
