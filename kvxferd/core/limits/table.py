"""What users or peers share of one node: a row for each limit.

docs/reference/limits.md shows the rows. Each is shared as `ledger` says, which counts who holds
how much.
"""

from __future__ import annotations

from typing import NamedTuple

from kvxferd.errors import OTHER_LIMIT
from kvxferd.wire.limits import MAX_REQUEST_IDS_BYTES

# Pulls, handshakes and waits for grants end within seconds, and make room.
RETRY_AFTER_S = 1.0
# Ranks and peers make room only when they leave, as in a restart, which takes longer.
RETRY_LATER_S = 10.0


SETTING = 0


class Limit(NamedTuple):
    """One limit. The texts are parts of a page's table, and of a refusal: "`total` OF are taken"."""

    name: str  # in `kvxferd_busy_refusals` and in tests
    total: int  # SETTING: `limits.` and the name is the setting that has it
    of: str  # what is counted
    past: str  # what happens to one more
    why: str  # its arithmetic
    is_of_peers: bool = False  # shared by CURVE key, or without keys by connection; else by user
    retry_after_s: float = RETRY_AFTER_S
    unit: str = ""  # "bytes", where they are
    refuses: bool = True  # with `busy`; False: what is past it is dropped, or something else goes


SESSIONS = Limit(
    "max_sessions",
    SETTING,
    "connections of this node's workers",
    "It is closed with `busy`",
    "64 ranks, a scheduler for each engine, and tools, twice over; each takes five descriptors",
    retry_after_s=RETRY_LATER_S,
)
PEERS = Limit(
    "max_peers",
    SETTING,
    "peers that are known",
    "An idle peer of who has most of them is forgotten; `busy` where there is none",
    "Each is a connection, two descriptors and some timers",
    retry_after_s=RETRY_LATER_S,
)
RANKS = Limit(
    "max_ranks",
    SETTING,
    "ranks of this node's workers",
    "`busy`",
    "Each has a mover, which is a process of 15 MB",
    retry_after_s=RETRY_LATER_S,
)
INFLIGHT_BYTES = Limit(
    "max_inflight_bytes",
    SETTING,
    "blocks into which pulls read that have not ended",
    "`busy`; a user's only pull may be of any size",
    "The operator knows how much may be read at a time",
    unit="bytes",
)
OPEN_REQUESTS = Limit(
    "open_requests",
    32_768,
    "requests to peers that have no reply yet, of all kinds; of `abandon`s of a session 1,024",
    "`busy`; a rank joins and leaves its home all the same, and the source of an `abandon` learns of it when "
    "its lease ends",
    "2 KB each: 64 MiB. 200 acknowledgements a second to a dead source, each repeated for 120 s, are "
    "24,000, and one user's share is 28,672. An engine that aborts eight requests a second, with a dead "
    "source, has 1,024 abandoned. A manifest is one for up to 20 s, also of an invented reference",
)
REMOTE_ENGINE_BYTES = Limit(
    "remote_engine_bytes",
    512 << 20,
    "manifests of other nodes' engines",
    "That user's oldest are forgotten and fetched again; `busy` where running and prepared pulls hold all",
    "64 ranks in 8 stages with 40 tensors, 40 regions and 1 KiB of metadata are 1 MiB: 448 such "
    "engines for a user who is alone. The largest manifest is counted for 16 to 60 MiB; 64 of them at"
    " each of 448 peers would be 450 GiB",
    retry_after_s=RETRY_LATER_S,
    unit="bytes",
)
PLAN_BYTES = Limit(
    "plan_bytes",
    160 << 20,
    "plans of all local ranks: those by which running and prepared pulls read, and those kept for the next; "
    "an extent takes 148 bytes, a plan 4 KiB more",
    "Unused ones of that user, and of users with more, are evicted, the longest unused first, and made again "
    "by the next pull; `busy` where running and prepared pulls read by all",
    "A plan of 80 layers has 160 extents for each rank that is read, 24 KiB: 1,600 plans that read four "
    "ranks. The largest there may be, of 65,536 extents that are all unlike, has 30 MiB",
    unit="bytes",
)
BLOCK_ID_BYTES = Limit(
    "block_id_bytes",
    512 << 20,
    "block ids that published transfers, pulls, prepared ones too (of a session 1,024), and the grants of "
    "pulls keep; each of these is counted for 2 KiB, 256 bytes a group, and 4 bytes an id",
    "`busy`; a pull is read without its preparation",
    "A request of 32,768 tokens at 16 a block keeps 8 KiB, one of a million 256 KiB: 44,000 and 1,778"
    " of them for a user who is alone, 3,200 and 127 for one who comes second. 8,192 transfers of 16 "
    "MiB would be 128 GiB an engine",
    unit="bytes",
)
ARRIVING_ID_BYTES = Limit(
    "arriving_id_bytes",
    16 * MAX_REQUEST_IDS_BYTES,
    "block ids that are arriving; of all users without a rank here 16 MiB",
    "`busy`",
    "Sixteen of the largest requests. One of a million tokens at 16 a block is 256 KiB, and arrives "
    "within a millisecond",
    unit="bytes",
)
EARLY_READY = Limit(
    "early_ready",
    1 << 16,
    "transfers that ranks report before their publish, by user, or by daemon where the rank is on another "
    "node; what that reported in vain counts until it is repeated no more; of an engine "
    "`max_transfers_per_engine`",
    "The report is not kept. Another daemon sends it again for two minutes; else the transfer is not ready "
    "before its rank says so again",
    "Eight engines with all transfers that they may have; an entry takes 1 KB where names are long",
    refuses=False,
)
ENDED_TRANSFERS = Limit(
    "ended_transfers",
    1 << 17,
    "transfers that have ended, for `tombstone_s` (600 s), in which no other of that id is taken",
    "Those that ended more than four minutes ago are forgotten; where there are none, `busy`",
    "0.4 KB each. 191 transfers a second of one user are remembered for ten minutes, and 477 for four, "
    "longer than messages about them are repeated. A late reader of one that is forgotten gets "
    "`transfer-unknown` instead of the reason for its end",
    retry_after_s=RETRY_LATER_S,
)
ACKNOWLEDGED = Limit(
    "acknowledged",
    1 << 18,
    "ranks of readers that have acknowledged transfers which others have yet to read; each reading "
    "engine counts as eight more",
    "The acknowledgement is not kept",
    "150 bytes each: 4,096 transfers that 64 ranks of one reader have read and others have not",
    is_of_peers=True,
    refuses=False,
)
GRANTS = Limit(
    "grants",
    1 << 17,
    "grants of other nodes' ranks on transfers; on one transfer 4,096",
    "`busy`; that engine's pull fails with it",
    "64 ranks with 1,024 pulls each have 65,536. With names of 256 characters a grant takes 1.5 KiB: 192 MiB",
    is_of_peers=True,
)
WAITING_BYTES = Limit(
    "waiting_bytes",
    256 << 20,
    "requests of other nodes that wait for ranks, a publish or movers; each is counted for 8 KiB, and 64 "
    "bytes and the characters of each name in it",
    "`busy`; that engine's pull fails with it",
    "32,768 requests at most, 28,672 of a peer that is alone: 28 ranks with 1,024 pulls each. One that reads "
    "64 ranks is 14 KiB, one that reads the largest engine's 4,096 ranks 350 KiB. What a request takes is a "
    "quarter of that: the rest is for the time that it takes to consider thousands of them",
    is_of_peers=True,
    unit="bytes",
)
OWNED_RANKS = Limit(
    "owned_ranks",
    8192,
    "ranks that are kept for their owners, users and daemons ([0003](../adr/0003-engine-ownership.md))",
    "Its owner loses its oldest absent one; a rank of who has none is served, and not kept",
    "0.5 KB each. Twice the largest engine leaves room for the ranks that left in the last minutes. A"
    " user may register four ranks a second, which are 2,400 in the time for which one is kept",
    is_of_peers=True,
    refuses=False,
)
MEMBER_BYTES = Limit(
    "member_bytes",
    256 << 20,
    "manifests of ranks of other nodes whose home this is, their metadata twice: also as readers get it",
    "`busy`",
    "The largest engine has 4,096 ranks, which take 24 MiB with 40 regions and 1 KiB of metadata "
    "each; 4,096 of the largest manifest would be 8 GiB",
    is_of_peers=True,
    retry_after_s=RETRY_LATER_S,
    unit="bytes",
)

TABLE = {
    limit.name: limit
    for limit in (
        SESSIONS, PEERS, RANKS, INFLIGHT_BYTES, BLOCK_ID_BYTES, ARRIVING_ID_BYTES, REMOTE_ENGINE_BYTES,
        PLAN_BYTES, OPEN_REQUESTS, EARLY_READY, ENDED_TRANSFERS, ACKNOWLEDGED, GRANTS, WAITING_BYTES,
        OWNED_RANKS, MEMBER_BYTES,
    )
}  # fmt: skip

# What refuses with `busy`: rows, then limits that are none. A refusal by any other is "other".
BUSY_LIMITS = (
    *(limit.name for limit in TABLE.values() if limit.refuses),
    *("max_transfers_per_engine", "max_pulls_per_rank", "mover_starts"),
    *("open_files", "worker_descriptors", "unfinished_registrations", "http"),
    OTHER_LIMIT,
)
