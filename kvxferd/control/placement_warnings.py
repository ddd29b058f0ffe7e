"""Warnings about placements: ranks whose memory is read slowly or without proof, and why."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from kvxferd.records import EngineSnapshot, RankSnapshot
from kvxferd.telemetry.warnings import NodeWarning, WarningKind, warning_of
from kvxferd.ucx_log import NETWORK, NODE

_CARDS = Path("/sys/class/infiniband")

SAME_NODE_TCP_WARNING = (
    "data between two processes of this node goes over TCP, though this kernel could copy it directly: the "
    "other daemon, or a worker's own mover, is of another user or PID namespace; run one daemon per node, or "
    "both as one user and, in containers, with hostPID"
)
SETTINGS_TCP_WARNING = (
    "data between two processes of this node goes over TCP, several times slower than a copy, and UCX has "
    "nothing faster here; see whether UCX_TLS in mover.environment leaves cma out, and "
    "`kvxferd doctor --check same_node`"
)


def placement_warnings(engines: Iterable[EngineSnapshot], cards: Sequence[str] = ()) -> list[NodeWarning]:
    """Return one warning for each problem, however many ranks have it. `cards`: with an active RDMA port."""
    ranks = [(engine.engine_id, rank) for engine in engines for rank in engine.ranks]
    found: dict[NodeWarning, list[str]] = {}
    for engine_id, rank in ranks:
        for problem in _problems(rank, cards):
            found.setdefault(problem, []).append(f"{engine_id} {rank.rank}")
    return [
        msgspec.structs.replace(one, message=f"{one.message} ({_some(names)})")
        for one, names in found.items()
    ]


def active_rdma_cards(cards: Path = _CARDS) -> list[str]:
    """Return the names of the RDMA devices with an active port. Only read at start: sysfs may be slow."""
    found = []
    for card in sorted(cards.glob("*")):
        try:
            is_active = any("ACTIVE" in state.read_text() for state in card.glob("ports/*/state"))
        except OSError:
            continue
        if is_active:
            found.append(card.name)
    return found


def _problems(rank: RankSnapshot, cards: Sequence[str]) -> Iterator[NodeWarning]:
    placement = rank.placement
    if placement is not None and placement.why:
        # The reason is the text of a mover, which may be any user's process: it is no part of a remedy.
        subject = f"{placement.kind}: {placement.why}"
        if placement.kind == "direct":
            message = f"pulls of a rank's memory may fail or be slow: {placement.why}"
            remedy = "`kvxferd doctor` says more"
            yield NodeWarning(WarningKind.PLACEMENT, subject, message, remedy)
        else:
            message = f"memory is reached the {placement.kind} way, not directly: {placement.why}"
            yield NodeWarning(WarningKind.PLACEMENT, subject, message)
    if any(lanes.slow for lanes in rank.lanes):
        yield warning_of(WarningKind.SAME_NODE_TCP, "", SAME_NODE_TCP_WARNING)
    elif any(lanes.reach == NODE and lanes.lanes == "tcp" for lanes in rank.lanes):
        yield warning_of(WarningKind.SAME_NODE_TCP, "settings", SETTINGS_TCP_WARNING)
    if cards and any(lanes.reach == NETWORK and lanes.lanes == "tcp" for lanes in rank.lanes):
        sentence = (
            f"data to another node goes over TCP, though this node has the RDMA card {cards[0]}; see whether "
            "the daemon may open /dev/infiniband/uverbs*, what UCX_TLS and UCX_NET_DEVICES in "
            "mover.environment allow, and whether the other node has a card"
        )
        yield warning_of(WarningKind.CARD_UNUSED, "", sentence)


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"
