"""The probe of `kvxferd doctor --peer`: what both daemons read of each other, and what that means."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvxferd.core.probe_client import MAX_PROBE_S
from kvxferd.doctor.finding import CheckContext, Finding, fail, ok, warn
from kvxferd.doctor.network_cards import rdma_cards
from kvxferd.errors import Code, KvxferdError
from kvxferd.ids import Endpoint
from kvxferd.tooling.control_client import ControlClient
from kvxferd.tooling.output import format_bytes, format_duration

FROM_IT, BY_IT = "probe from it", "probe by it"
SLOW_PATH = "docs/how-to/when-something-is-wrong.md"
LOOK_AT_LOGS = "look for `probe ended` in the log of both daemons"
# What a direction that could not be read calls for.
REMEDIES = {
    Code.DEADLINE: "movers reach each other on ports of their own: open TCP between the nodes, both ways",
    Code.TRANSPORT: "movers reach each other on ports of their own: open TCP between the nodes, both ways",
    Code.NIXL_UNAVAILABLE: "run `kvxferd doctor` on the node that says so",
}


def probe_peer(node: CheckContext, peer: Endpoint, size_bytes: int) -> Iterator[Finding]:
    """Yield what a probe finds in each direction."""
    daemon = ControlClient(node.daemon.socket_path, MAX_PROBE_S)
    try:
        found = daemon.post("/v1/peers/probe", {"endpoint": peer, "size_bytes": size_bytes})
    except KvxferdError as error:
        yield _not_probed(error)
        return
    yield _direction(FROM_IT, found["read"])
    yield _direction(BY_IT, found["read_back"])


def _not_probed(error: KvxferdError) -> Finding:
    """Return why no byte was read. Where nothing is wrong with the way between, it is no failure."""
    facts: dict[str, Any] = {"code": error.code.value}
    match error.code:
        case Code.BUSY | Code.DRAINING:
            return warn("probe", error.message, "run it again later, or use --no-probe", **facts)
    return fail("probe", error.message, LOOK_AT_LOGS, essential=True, **facts)


def _direction(check: str, read: Mapping[str, Any] | None) -> Finding:
    """Return the finding of a direction as the reader measured it."""
    if read is None:
        return fail(check, "not tried", LOOK_AT_LOGS, essential=True)
    facts = dict(read)
    if read["code"] is not None:
        todo = REMEDIES.get(read["code"], LOOK_AT_LOGS)
        return fail(check, f"{read['message']} [{read['code']}]", todo, essential=True, **facts)
    transports, reach = read["transports"] or "unknown transports", read["reach"]
    found = (
        f"{read['gigabytes_per_s']:.3g} GB/s by {transports}{_where(reach)}; "
        f"{format_bytes(read['verified_bytes'])} verified, connecting took {format_duration(read['first_s'])}"
    )
    if read["wrong_bytes"]:
        found = f"{format_bytes(read['wrong_bytes'])} differ from what the source says that it has; {found}"
        todo = "do not use this way: a daemon or its network card is broken"
        return fail(check, found, todo, essential=True, **facts)
    if read["is_slow"]:
        todo = f"let the daemons read from each other's processes (one user, one PID namespace): {SLOW_PATH}"
        return warn(check, f"{found}; a faster way exists on this machine", todo, **facts)
    if reach == "network" and read["transports"] == "tcp" and (cards := rdma_cards()):
        todo = f"let movers use {', '.join(card.name for card in cards)} on both nodes: {SLOW_PATH}"
        return warn(check, f"{found}, although there is an RDMA card here", todo, **facts)
    return ok(check, found, **facts)


def _where(reach: str) -> str:
    return {"node": " within one machine", "network": " over the network"}.get(reach, "")
