"""The checks of a rank's spec, layout and binding before the node uses them, and what readers get of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import TypeVar

import msgspec

from kvxferd.core.events import CheckedLayout
from kvxferd.errors import Code, EngineError
from kvxferd.ids import Digest, Incarnation, Rank
from kvxferd.layout import EngineSpec, RankLayout, digest_of
from kvxferd.layout.validate import validate_layout, validate_spec
from kvxferd.plan import set_xfer_handshake_metadata_pp_aware
from kvxferd.wire.common import RankManifest, RegionAddress
from kvxferd.wire.endpoint import parse_endpoint
from kvxferd.wire.limits import (
    MAX_ADDRESS,
    MAX_DESCRIPTORS_PER_RANK,
    MAX_DEVICES,
    MAX_ENGINE_TENSORS,
    MAX_NAME_CHARS,
    MAX_REGIONS,
)

MEM_TYPES = ("DRAM", "VRAM")
# Pieces of a whole engine's regions, each registered by itself: 32 ranks of 8,192 different ones. Equal
# pieces that follow each other are one entry. Checking them takes 50 ms.
MAX_ENGINE_PIECES = 1 << 18

Metadata = TypeVar("Metadata")
# Engines of one model that are deployed alike have the same layouts: a rank's 40 tensors are 15 KiB of
# objects, and a thousand engines of 64 ranks would be a GiB of equal ones. Checking a layout takes a hundred
# times as long as its digest. 262,144 tensors are 100 MiB, and a hundred different deployments.
MAX_CACHED_TENSORS = 1 << 18


class LayoutCache:
    """Keeps the layouts that were used last. A layout that it returned stays valid after its eviction.

    Of an engine's spec, a layout's check uses only the number of layers: a layout is kept for each.
    """

    def __init__(self) -> None:
        self._cached: OrderedDict[tuple[Digest, int], RankLayout] = OrderedDict()
        self._num_tensors = 0

    def __len__(self) -> int:
        return len(self._cached)

    def get_checked(self, spec: EngineSpec, layout: RankLayout) -> CheckedLayout:
        """Return the layout, or an equal one seen before. Raises LayoutError as `validate_layout` does."""
        digest = digest_of(layout)
        cached = self._cached.get((digest, spec.num_layers))
        if cached is None:
            validate_layout(spec, layout)
        else:
            validate_spec(spec)
        checked = CheckedLayout(digest, cached or layout, spec.num_layers)
        self.add_checked(checked)
        return checked

    def add_checked(self, checked: CheckedLayout) -> None:
        """Keep a layout that a thread has checked, and evict the longest unused of too many."""
        key = (checked.digest, checked.num_layers)
        if key in self._cached:
            self._cached.move_to_end(key)
            return
        self._cached[key] = checked.layout
        self._num_tensors += len(checked.layout.tensors)
        while self._num_tensors > MAX_CACHED_TENSORS:
            _, oldest = self._cached.popitem(last=False)
            self._num_tensors -= len(oldest.tensors)


def check_names(what: str, *names: str) -> None:
    """Raise EngineError for a name that is empty or too long, before anything keeps it."""
    for name in names:
        if not 0 < len(name) <= MAX_NAME_CHARS:
            raise EngineError(
                f"cannot {what}: a name of {len(name)} characters; use 1 to {MAX_NAME_CHARS}",
                Code.RANK_INVALID,
            )


def check_spec(spec: EngineSpec, incarnation: Incarnation) -> EngineSpec:
    """Return the spec with its home in the normal form of endpoints. Raises EngineError for an invalid spec.

    Called before anything lists the engine's ranks: two large sizes make a list that fits in no memory.
    """
    check_names("register", spec.engine_id, spec.generation, incarnation)
    validate_spec(spec)
    return msgspec.structs.replace(spec, home=parse_endpoint(spec.home)) if spec.home else spec


def check_manifests(
    manifests: Sequence[RankManifest], layouts: LayoutCache
) -> tuple[dict[Rank, RankManifest], dict[Rank, CheckedLayout]]:
    """Return the ranks of an engine in another daemon's manifest as `check_manifest` does, and their layouts.

    The cost of the whole is limited: a manifest that names one rank a thousand times is refused first.
    """
    spec = manifests[0].spec
    num_tensors = sum(len(manifest.layout.tensors) for manifest in manifests)
    if num_tensors > MAX_ENGINE_TENSORS or len({m.rank for m in manifests}) != len(manifests):
        raise EngineError(
            f"cannot use the manifest of engine {spec.key}: {len(manifests)} ranks with {num_tensors} cache "
            f"tensors; each rank once, and {MAX_ENGINE_TENSORS} tensors at most",
            Code.LAYOUT_INVALID,
        )
    if sum(_num_pieces(manifest) for manifest in manifests) > MAX_ENGINE_PIECES:
        raise EngineError(
            f"cannot use the manifest of engine {spec.key}: its regions lie in more than {MAX_ENGINE_PIECES} "
            "pieces",
            Code.REGION_INVALID,
        )
    ranks, checked = {}, {}
    for manifest in manifests:
        ranks[manifest.rank], checked[manifest.rank] = _check_manifest(manifest, layouts)
    return ranks, checked


def check_manifest(manifest: RankManifest, layouts: LayoutCache) -> RankManifest:
    """Return another daemon's manifest of a rank, checked as a registration is.

    If `layouts` has an equal layout, the result shares it.
    """
    return _check_manifest(manifest, layouts)[0]


def _check_manifest(manifest: RankManifest, layouts: LayoutCache) -> tuple[RankManifest, CheckedLayout]:
    spec = check_spec(manifest.spec, manifest.binding.incarnation)
    checked = layouts.get_checked(spec, manifest.layout)
    binding = manifest.binding
    bound = {region.region: region.size_bytes for region in binding.regions}
    wanted = {region.region: region.size_bytes for region in manifest.layout.regions}
    problem = ""
    if len(binding.regions) > MAX_REGIONS or bound != wanted:
        problem = "it binds other regions than its layout's"
    elif _num_pieces(manifest) > MAX_DESCRIPTORS_PER_RANK:
        problem = f"its regions lie in more than {MAX_DESCRIPTORS_PER_RANK} pieces"
    elif wrong := next((r.region for r in binding.regions if not _is_valid_region(r)), None):
        problem = f"region {wrong} lies where none can"
    elif not binding.agent:
        problem = "its agent has no name"
    if problem:
        raise EngineError(f"cannot use rank {spec.rank} of engine {spec.key}: {problem}", Code.REGION_INVALID)
    return RankManifest(spec, checked.layout, binding), checked


def checked_layouts(manifests: tuple[RankManifest, ...], layouts: LayoutCache) -> tuple[CheckedLayout, ...]:
    """Return the manifests' layouts once they are checked. Raises as `check_manifests` does.

    This takes 25 to 40 us a cache tensor, so 2.5 s for the largest engine: a thread calls it, with `layouts`
    of its own. The node that gets the result does not check them again.
    """
    return tuple(check_manifests(manifests, layouts)[1].values())


def _num_pieces(manifest: RankManifest) -> int:
    return sum(len(region.pieces) for region in manifest.binding.regions)


def _is_valid_region(region: RegionAddress) -> bool:
    """Whether another daemon's address, device and pieces of a region are possible."""
    pieces = region.pieces
    return (
        0 < region.address <= MAX_ADDRESS - region.size_bytes
        and 0 <= region.device < MAX_DEVICES
        and region.mem_type in MEM_TYPES
        and all(count > 0 and size > 0 for count, size in pieces)
        and sum(count for count, _ in pieces) <= MAX_DESCRIPTORS_PER_RANK
        and (not pieces or sum(count * size for count, size in pieces) == region.size_bytes)
    )


def aggregate_metadata(
    metadata: Iterable[Mapping[Rank, Metadata] | None], reader: str, pp_aware: bool
) -> dict[Rank, Metadata]:
    """Return the merged metadata that the reader gets, stage by stage.

    Raises NotPPAwareError, which names the reader, where it is not PP-aware and there are later stages.
    """
    by_rank: dict[Rank, Metadata] = {}

    def keep(found: Mapping[tuple[int, int], Metadata]) -> None:
        by_rank.update({Rank(*rank): found[rank] for rank in sorted(found)})

    def keep_first_stage(found: Mapping[int, Metadata]) -> None:
        keep({(0, tp_rank): one for tp_rank, one in found.items()})

    consumer = SimpleNamespace(consumer_name=reader, set_xfer_handshake_metadata=keep_first_stage)
    if pp_aware:
        consumer.set_xfer_handshake_metadata_pp_aware = keep
    set_xfer_handshake_metadata_pp_aware(consumer, metadata)
    return by_rank
