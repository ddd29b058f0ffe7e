"""What a lost connection proves of the reads in flight on it: the table by which a mover decides.

The table is keyed by backend and transport. A backend that is not in it proves nothing: each lost connection
costs a mover and the quarantine of its blocks, and never wrong bytes.

UCX reports a disconnect from an endpoint that it has closed by force. On some transports nothing lands
after that. On a network card it proves nothing: there are two rails, writes may pass one another, a
request's timeout is reported alike, and newer versions fail over between lanes. So a mover reads in UCX's log
by which transports it has connected. A read that may go on keeps its pull in doubt until the mover is dead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvxferd.mover.backends import UCX, Backend
from kvxferd.ucx_log import TransportsUsed, transport_kind

# By backend, the transports on which nothing lands after a disconnect, each with its evidence. Every other
# one is in doubt. Of UCX these are rc, dc and ud (two rails), cuda_ipc, rocm and gaudi (copies of a device),
# posix, sysv, xpmem and knem (never chosen here: they do not report a peer's death), and all unknown ones.
NO_WRITES_AFTER_DISCONNECT: Mapping[str, Mapping[str, str]] = {
    UCX: {
        "cma": "the reader's own call copies the bytes; source killed mid-read: no byte after the report",
        "tcp": "the reader's own thread takes the bytes off the socket; source killed mid-read: none after",
        "self": "the source is the reader's own thread",
    },
}
# The evidence is of one worker in one thread. With others (num_workers, num_threads) a read is split, and one
# part's report proves nothing of a part that another thread copies. These parameters leave it as it was.
HARMLESS_PARAMETERS: Mapping[str, frozenset[str]] = {UCX: frozenset({"ucx_devices"})}


def provable_transports(backend: Backend) -> Mapping[str, str]:
    """Return the transports of a backend on which a disconnect ends reads, each with its evidence."""
    if not backend.parameters.keys() <= HARMLESS_PARAMETERS.get(backend.name, frozenset()):
        return {}
    return NO_WRITES_AFTER_DISCONNECT.get(backend.name, {})


def transports_prove_over(backend: Backend, lanes: Sequence[TransportsUsed]) -> bool:
    """Whether a disconnect ends every read of a mover that has connected by these transports alone.

    UCX does not report which peer a line is about. So all of the mover's connections count; where none is
    known, nothing is proved.
    """
    provable = provable_transports(backend)
    return bool(lanes) and all(
        one.is_fully_parsed and one.transports and all(transport_kind(t) in provable for t in one.transports)
        for one in lanes
    )


def ucx_tls_proves_over(backend: Backend, ucx_tls: str) -> bool:
    """Whether the setting `UCX_TLS` allows only transports on which nothing lands after a disconnect.

    It binds UCX alone: of another backend it says nothing.
    """
    if backend.name != UCX:
        return False
    # cuda_copy reaches no other process: it copies what came by the others.
    names = {name.strip() for name in ucx_tls.split(",")} - {"cuda_copy"}
    # A negation, an alias and the empty string are not in the table.
    return bool(names) and names <= provable_transports(backend).keys()
