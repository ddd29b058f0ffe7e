"""What an operator can do about failed pulls, by their code. The commands can be pasted."""

from __future__ import annotations

import shlex

from kvxferd.errors import Code
from kvxferd.ids import Endpoint

_PING = (
    "run `{ping}`: it tells a daemon that is down, a network that drops, and a key or an address that is not "
    "admitted there"
)
REMEDIES: dict[str, str] = {
    Code.PEER_UNREACHABLE: _PING,
    Code.DEADLINE: (
        "the message names who did not reply. A daemon: "
        f"{_PING}. An engine or a rank: look at its process there, and at its mover, `kvxferd-mover` in `ps`"
    ),
    Code.RELEASED: (
        "the source took its blocks back too early, and the message has why: look at that engine"
    ),
    Code.LEASE_EXPIRED: (
        "the pull came after its lease: raise transfer.lease_s at the source, or let decode pull or prepare "
        "sooner. Or it waited, and its engine reported no tokens for as long: look at that engine"
    ),
    Code.BUSY: "a limit is reached, and the message in `kvxferd history --failed` names it",
    Code.NOT_ALLOWED: (
        "run `{ping}`: it tells whether this node's allow-lists lack that daemon, or the other way round; "
        "docs/how-to/keys.md"
    ),
    Code.MOVER_LOST: "movers die here: look for `mover died` in this log and in the kernel's",
    Code.SOURCE_STALLED: "look at the source node: a process may be stopped, or the network hang",
    Code.TRANSFER_UNKNOWN: (
        "the source has no such transfer: its publish was refused there (`kvxferd status` on that node), it "
        "was released, or the daemon restarted and the router's references are old"
    ),
    Code.TRANSPORT: "the message has the transport's own text: run `kvxferd doctor` here and there",
}
DEFAULT_REMEDY = (
    "`kvxferd history --failed` has each message; docs/how-to/when-something-is-wrong.md lists the codes"
)


def remedy_of(code: str, peer: Endpoint, config_path: str) -> str:
    """Return what to do about pulls from `peer` that fail with this code.

    `peer`: with its key, where it has one; "": not known. `config_path`: of the file by which this node's
    daemon was started, which names its own key; "": the environment and flags alone have the settings.
    """
    options = f" --config {shlex.quote(config_path)}" if config_path else ""
    ping = f"kvxferd ping {shlex.quote(peer) if peer else 'ENDPOINT'}{options}"
    return REMEDIES.get(code, DEFAULT_REMEDY).format(ping=ping)
