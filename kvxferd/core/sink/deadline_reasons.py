"""Whom a pull waited for when its deadline passed, and the sentence that names it.

A peer that waits says why every `peer.request_timeout_s` alone, which a short deadline may not meet. So
shortly before the deadline the daemon sends its request to the peer again, or one to the mover, that the pull
waits for: who does not reply is named. Nothing is decided by it.
"""

from __future__ import annotations

from kvxferd.core.sink.grants import GrantClient
from kvxferd.core.sink.held_grant import GrantState
from kvxferd.core.sink.needs import Need
from kvxferd.core.sink.pull import Piece, Pull
from kvxferd.wire.endpoint import address_of

# Of a rank's names in a message: an engine may have 4,096.
MAX_NAMED_RANKS = 4


def describe_wait(pull: Pull, need: Need | Piece, grant_client: GrantClient) -> tuple[str, str]:
    """Return whom a pull waits for that no mover has, and the sentence for its message."""
    hold = pull.held_grant
    if hold.state in (GrantState.HANDSHAKING, GrantState.REQUESTING):
        return grant_client.describe_wait(hold)
    if hold.state is GrantState.PLANNING:
        what = f"while this node planned the reads of engine {hold.ref.engine}"
        return "this node", f"{what}; check that its processors are free"
    rank = f"rank {pull.rank.spec.rank} of engine {pull.rank.spec.engine_id}"
    if need is Need.WORKER:
        return f"the worker of {rank}", f"while it waited for the worker of {rank}, after its mover died"
    if need is Need.TOKENS:
        engine = f"engine {pull.ref.engine_id}"
        has = f"{pull.tokens_read} of {pull.num_tokens} tokens are read"
        return f"the ranks of {engine}", f"while {engine} computed the rest ({has}); look at that engine"
    return (
        f"the mover of {rank}",
        f"while it waited for a mover of {rank}; see the log for why it has none",
    )


def describe_read(pull: Pull) -> tuple[str, str]:
    """Return whom a pull waits for that its mover reads, and the sentence for its message."""
    hold, progress = pull.held_grant, pull.progress
    if pull.report_requested and (progress is None or not progress.agents):
        mover = f"the mover of rank {pull.rank.spec.rank} of engine {pull.rank.spec.engine_id}"
        why = f"was in its phase {progress.phase}" if progress else "did not reply to this daemon"
        return mover, f"{mover} {why}; check that this node's processors are free"
    remote, reads = hold.remote, hold.reads
    if remote is None or reads is None:
        return "", "its source is forgotten"
    ranks = list(reads.sources)
    if progress is not None:
        awaited = set(progress.agents)
        ranks = [rank for rank in ranks if remote.ranks[rank].binding.agent in awaited]
    engine = f"engine {pull.ref.engine_id}"
    where = f"{engine}, whose daemon is {address_of(pull.ref.endpoint)}"
    check = "check that node, and the network between"
    if not ranks:  # the fence word's mover may be another than those that are read
        return f"the publisher of {engine}", f"the fence word's mover of {where}, did not reply; {check}"
    names = "rank" + "s" * (len(ranks) > 1) + " " + ", ".join(map(str, ranks[:MAX_NAMED_RANKS]))
    if len(ranks) > MAX_NAMED_RANKS:
        names += f" and {len(ranks) - MAX_NAMED_RANKS} more"
    return f"{names} of {engine}", f"{names} of {where}, did not reply; {check}"
