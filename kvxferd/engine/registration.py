"""`register`: from an engine's tensors to its rank; `resume`: again, after the rank slept."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvxferd.client import RankHandle, Region, connect
from kvxferd.engine.placement_search import PlacementSearch
from kvxferd.engine.rank_sharing import RankSharing
from kvxferd.errors import LayoutError
from kvxferd.ids import RegionId
from kvxferd.layout import EngineSpec, Group, NamedTensor, from_tensors
from kvxferd.layout.tensor_views import TensorLike
from kvxferd.memory import MemoryPlacement, SealedMemory, SharedMemory, share_all

_LOG = logging.getLogger("kvxferd.engine")

_OF_CHILD = (MemoryPlacement.MEMFD, MemoryPlacement.ADOPTED, MemoryPlacement.EXPORTED)


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
    deadline = time.monotonic() + timeout_s
    layout = from_tensors(spec, tensors, groups, layers)
    plain = {name: named.tensor for name, named in tensors.items()}
    name = f"{spec.engine_id} ({spec.pp_rank}, {spec.tp_rank})"
    wanted = tuple(MemoryPlacement) if placements is None else tuple(placements)
    of_child = [placement for placement in wanted if placement != MemoryPlacement.RESIDENT]
    movers = ["child"] if of_child or not wanted else []
    movers += ["resident"] if MemoryPlacement.RESIDENT in wanted else []
    search = PlacementSearch(
        f"rank ({spec.pp_rank}, {spec.tp_rank}) of {spec.engine_id}",
        movers,
        lambda error: f"{error.message} ({error.code})",
        insist='give placements=["resident"] to try it all the same',
    )
    sharing = RankSharing(
        lambda mover: _share(plain, of_child if mover == "child" else [MemoryPlacement.RESIDENT]),
        search,
        _LOG,
    )
    try:
        rank = sharing.register(
            lambda: connect(socket, timeout_s=max(1.0, deadline - time.monotonic()), name=name),
            spec,
            layout,
            deadline,
        )
    except BaseException:
        sharing.shared.close()
        raise
    sharing.shared.close_with(rank)
    return rank


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
    plain = {name: named.tensor for name, named in tensors.items()}
    shared = _share(plain, [MemoryPlacement.RESIDENT] if rank.is_resident else _OF_CHILD)
    shared.close_with(rank)
    rank.resume(shared.regions, timeout_s)


@dataclass(frozen=True)
class _SharedTensors:
    """The allocations under an engine's tensors, by region id."""

    memories: Mapping[str, SharedMemory]

    @property
    def regions(self) -> list[Region]:
        return [Region(RegionId(name), own.memory, own.offset) for name, own in self.memories.items()]

    def close(self) -> None:
        for memory in self.memories.values():
            memory.close()

    def close_with(self, rank: RankHandle) -> None:
        """Keep adopted memory until the rank is closed: `share_all` finds it again. Keep nothing else."""
        for own in self.memories.values():
            if own.placement is MemoryPlacement.ADOPTED and isinstance(own.memory, SealedMemory):
                rank.call_at_close(own.memory.close)


def _share(tensors: Mapping[str, TensorLike], placements: Sequence[str]) -> _SharedTensors:
    return _SharedTensors(share_all(tensors, placements))
