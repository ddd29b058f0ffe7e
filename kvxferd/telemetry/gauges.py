"""The states that metrics and the command line show of engines, ranks, peers and transports."""

from __future__ import annotations

from kvxferd.core.ranks.rank import RankState
from kvxferd.records import EngineSnapshot

RANK_STATES = (*(state.value for state in RankState if state is not RankState.GONE), "remote")
ENGINE_STATES = ("readable", "incomplete", "member")
PEER_STATES = ("connecting", "up", "silent")
# RDMA; GPU transports; one copy from process to process; TCP.
TRANSPORT_CLASSES = ("rdma", "gpu", "copy", "tcp", "other")
TRANSFER_STATES = ("writing", "readable", "granted")


def transport_class(transports: str) -> str:
    """Return which of `TRANSPORT_CLASSES` the transports belong to; RDMA wins where they are mixed."""
    kinds = {name.partition("/")[0].partition("_")[0] for name in transports.split(", ")}
    if kinds & {"rc", "dc", "ud", "srd", "gga"}:
        return "rdma"
    if transports == "tcp":
        return "tcp"
    if kinds & {"cma", "xpmem", "knem"} and len(kinds) == 1:
        return "copy"
    return "gpu" if kinds & {"cuda", "rocm", "gdr", "ze"} else "other"


def engine_state(engine: EngineSnapshot) -> str:
    """Return which of `ENGINE_STATES` the engine is in."""
    if engine.complete:
        return "readable"
    # All local ranks are present; the home daemon, on another node, assembles the engine.
    return "incomplete" if engine.lacking else "member"
