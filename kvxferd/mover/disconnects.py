"""What a lost connection proves of the reads in flight on it: the table by which the daemon decides.

The library reports a disconnect from an endpoint that it has closed by force. On some transports nothing
lands after that. On a network card it proves nothing: there are two rails, writes may pass one another, a
request's timeout is reported alike, and newer versions fail over between lanes. So a mover asks its daemon,
which reads in the mover's log by which transports it has connected. A read that may go on keeps its pull in
doubt until the mover is dead.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvxferd.core.ucx_log import TransportsUsed, transport_kind

# The transports on which nothing lands after a disconnect, each with its evidence. Every other one is in
# doubt: rc, dc and ud (two rails), cuda_ipc, rocm and gaudi (copies of a device), posix, sysv, xpmem and
# knem (never chosen here: they do not report a peer's death), and all that are unknown.
NO_WRITES_AFTER_DISCONNECT = {
    "cma": "the reader's own call copies the bytes; source killed mid-read: no byte after the report",
    "tcp": "the reader's own thread takes the bytes off the socket; source killed mid-read: no byte after it",
    "self": "the source is the reader's own thread",
}


def transports_prove_over(lanes: Sequence[TransportsUsed]) -> bool:
    """Whether a disconnect ends every read of a mover that has connected by these transports alone.

    UCX does not report which peer a line is about. So all of the mover's connections count; where none is
    known, nothing is proved.
    """
    return bool(lanes) and all(
        one.is_fully_parsed
        and one.transports
        and all(transport_kind(t) in NO_WRITES_AFTER_DISCONNECT for t in one.transports)
        for one in lanes
    )


def ucx_tls_proves_over(ucx_tls: str) -> bool:
    """Whether the setting `UCX_TLS` allows only transports on which nothing lands after a disconnect."""
    names = [name.strip() for name in ucx_tls.split(",")]
    # A negation, an alias and the empty string are not in the table.
    return all(name in NO_WRITES_AFTER_DISCONNECT for name in names)
