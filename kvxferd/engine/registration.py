"""`register`: from an engine's tensors to its rank; `resume`: again, after the rank slept.

A rank's mover is a process of the daemon (`child`), which maps the memory, or a thread of this process
(`resident`), which needs the transfer library here and reads any memory. The first that works is taken.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from kvxferd.client import Client, RankHandle, connect
from kvxferd.errors import Code, EngineError, KvxferdError, LayoutError
from kvxferd.layout import (
    EngineSpec,
    Group,
    NamedTensor,
    RankLayout,
    TensorRegion,
    from_tensors,
    tensor_regions,
)
from kvxferd.memory import MemoryPlacement, SealedMemory, SharedMemory, share_regions

_LOG = logging.getLogger("kvxferd.engine")

OF_CHILD = (MemoryPlacement.MEMFD, MemoryPlacement.ADOPTED, MemoryPlacement.EXPORTED)
# What each mover means for the engine, as a sentence of the log.
_MEANINGS = {
    "child": (
        "Its mover is a process of the daemon: a crash in it leaves this engine alone, and it can be killed"
    ),
    "resident": (
        "Its mover is a thread of this worker: a crash in it ends this engine, and it cannot be killed"
    ),
}
# Codes that concern the placement alone, so that another may work.
_OF_PLACEMENT = frozenset(
    {
        Code.DEVICE_UNAVAILABLE,
        Code.DEVICE_ERROR,
        Code.REGION_NOT_EXPORTABLE,
        Code.NIXL_UNAVAILABLE,
        Code.MOVER_LOST,
    }
)


def register(
    socket: str | os.PathLike[str],
    spec: EngineSpec,
    tensors: Mapping[str, NamedTensor],
    groups: Iterable[Group] | None = None,
    *,
    layers: range | None = None,
    placements: Sequence[str] | None = None,
    timeout_s: float = 60.0,
) -> RankHandle:
    """Register a rank, whose cache lies in these tensors, with the daemon of this node. Blocks.

    Call it before the engine's first forward pass: nothing may write host memory while it is shared
    (`kvxferd.memory.share`). Where the daemon, or this environment, refuses a placement, the next is tried; a
    daemon that is not there yet, or is busy, is waited for. Where this raises, the engine should end:
    memory is not adopted twice.

    Args:
        socket: the daemon's worker socket, `worker.socket` in its configuration.
        spec: the engine, and this rank's place in it.
        tensors, groups, layers: as `kvxferd.layout.from_tensors` takes them.
        placements: those to try, in order, of "memfd", "adopted", "exported" and, at last, "resident".
            None: all.
        timeout_s: seconds for all of it.

    Raises:
        LayoutError: the tensors cannot be described; the message names the tensor and the dimension.
        EngineError: no placement works, and the message lists each and why; or the daemon refused the rank.
        KvxferdError: no daemon, or no reply, within `timeout_s` (`daemon-lost`, `deadline`).
    """
    layout = from_tensors(spec, tensors, groups, layers)
    return register_regions(
        socket, spec, layout, _regions(tensors), placements=placements, timeout_s=timeout_s
    )


def register_regions(
    socket: str | os.PathLike[str],
    spec: EngineSpec,
    layout: RankLayout,
    regions: Sequence[TensorRegion],
    *,
    placements: Sequence[str] | None = None,
    timeout_s: float = 60.0,
    explain: Callable[[KvxferdError], str] = lambda error: f"{error.message} ({error.code})",
    insist: str = 'give placements=["resident"]',
    log: logging.Logger = _LOG,
) -> RankHandle:
    """Do the same for a layout that is known, with the allocations of its regions.

    `explain` returns why a placement does not work, and what mends it. `insist`: how to have a thread of this
    process tried after a mover's death has ruled it out.
    """
    deadline = time.monotonic() + timeout_s
    rank_name = f"rank ({spec.pp_rank}, {spec.tp_rank}) of {spec.engine_id}"
    failures: dict[str, str] = {}
    last: KvxferdError | None = None
    for mover, kinds in _by_mover(placements).items():
        if last is not None and last.code is Code.MOVER_LOST:
            failures[mover] = (
                "not tried after that: what ended a mover outside would end this engine inside; "
                f"{insist} to try it all the same"
            )
            continue
        try:
            rank = _register_as(kinds, socket, spec, layout, regions, deadline)
        except KvxferdError as error:
            if error.code not in _OF_PLACEMENT:
                raise
            failures[mover], last = explain(error), error
            continue
        before = "".join(f"; {failed} does not work: {why}" for failed, why in failures.items())
        log.info("%s", f"placement of {rank_name}: {mover}. {_MEANINGS[mover]}{before}")
        return rank
    assert last is not None
    lines = "".join(f"\n  {mover}: {why}" for mover, why in failures.items())
    raise EngineError(f"cannot register {rank_name}: no placement works{lines}", last.code) from last


def _by_mover(placements: Sequence[str] | None) -> dict[str, Sequence[str]]:
    """Return the placements to try with each mover."""
    wanted = tuple(MemoryPlacement) if placements is None else tuple(placements)
    of_child = [placement for placement in wanted if placement != MemoryPlacement.RESIDENT]
    movers: dict[str, Sequence[str]] = {"child": of_child} if of_child or not wanted else {}
    return movers | ({"resident": [MemoryPlacement.RESIDENT]} if MemoryPlacement.RESIDENT in wanted else {})


def _register_as(
    placements: Sequence[str],
    socket: str | os.PathLike[str],
    spec: EngineSpec,
    layout: RankLayout,
    regions: Sequence[TensorRegion],
    deadline: float,
) -> RankHandle:
    """Share the memory in one of these placements, and register the rank over a connection of its own."""
    shared = share_regions(regions, placements)
    try:
        name = f"{spec.engine_id} ({spec.pp_rank}, {spec.tp_rank})"
        connection = connect(socket, timeout_s=max(1.0, deadline - time.monotonic()), name=name)
        rank = _register_with_retries(connection, spec, layout, shared, deadline)
    except BaseException:
        for one in shared.values():
            one.close()
        raise
    _close_with(rank, shared)
    return rank


def _register_with_retries(
    connection: Client,
    spec: EngineSpec,
    layout: RankLayout,
    shared: Mapping[str, SharedMemory],
    deadline: float,
) -> RankHandle:
    """Register a rank, and start its mover here if no other process can map the memory.

    A daemon that is busy is asked again.
    """
    while True:
        left = max(1.0, deadline - time.monotonic())
        try:
            if not any(one.is_resident for one in shared.values()):
                return connection.register(spec, layout, shared, left)
            from kvxferd import resident  # imports the transfer library: only where it is needed

            return resident.register(connection, spec, layout, shared, left)
        except EngineError as error:
            if error.code is not Code.BUSY or time.monotonic() + error.retry_after_s > deadline:
                connection.close()
                raise
            time.sleep(error.retry_after_s or 0.1)  # engine start: nothing else waits for this thread
        except BaseException:
            connection.close()
            raise


def resume(rank: RankHandle, tensors: Mapping[str, NamedTensor], timeout_s: float = 30.0) -> None:
    """Register a rank's memory again, after `Suspended`: the same names, in tensors of the same layout.

    A GPU's memory may have been freed meanwhile; host memory stays allocated, because what is adopted is
    freed only when the rank is closed. Blocks and raises as `RankHandle.resume` does, and raises as
    `register` does where the memory cannot be shared as it was. Raises LayoutError where the tensors do not
    lie in their memory as they did; their addresses may have changed.
    """
    known = rank.layout
    layout = from_tensors(rank.spec, tensors, known.groups, range(known.start_layer, known.end_layer))
    if layout != known:
        raise LayoutError(
            f"cannot resume rank ({rank.spec.pp_rank}, {rank.spec.tp_rank}) of {rank.spec.engine_id}: the "
            "tensors are not laid out as at `register`; give the same names, shapes, strides and storages, "
            "or close the rank and register a new one"
        )
    resume_regions(rank, _regions(tensors), timeout_s)


def resume_regions(rank: RankHandle, regions: Sequence[TensorRegion], timeout_s: float = 30.0) -> None:
    """Do the same for the allocations of the rank's regions."""
    shared = share_regions(regions, [MemoryPlacement.RESIDENT] if rank.is_resident else OF_CHILD)
    _close_with(rank, shared)
    rank.resume(shared, timeout_s)


def _regions(tensors: Mapping[str, NamedTensor]) -> Sequence[TensorRegion]:
    return tensor_regions({name: named.tensor for name, named in tensors.items()})


def _close_with(rank: RankHandle, shared: Mapping[str, SharedMemory]) -> None:
    """Keep adopted memory until the rank is closed: `share_regions` finds it again. Keep nothing else."""
    for own in shared.values():
        if own.placement is MemoryPlacement.ADOPTED and isinstance(own.memory, SealedMemory):
            rank.call_at_close(own.memory.close)
