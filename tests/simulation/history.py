"""What a daemon's history says of pulls and transfers that have ended, against what engines have heard."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from kvxferd.errors import Code
from kvxferd.ids import Rank
from kvxferd.records import PHASES, PullRecord, ReleaseRecord
from kvxferd.telemetry.history import record_from_json

LIMIT = 512  # records of a reply; an episode's node has fewer
HISTORY = f"/v1/history?kind=pull,release&limit={LIMIT}"
ROUNDING_S = 1e-6


class End(NamedTuple):
    """How one pull ended, as its engine has heard of it."""

    transfer_id: str
    sink: str
    rank: Rank
    code: Code | None = None  # None: delivered
    num_bytes: int = 0  # of a delivery
    num_runs: int = 0


class Heard:
    """What the engines of one node have heard."""

    def __init__(self) -> None:
        self.ends: Counter[End] = Counter()
        self.of_clients: Counter[End] = Counter()  # of them: that a client has failed by itself
        self.releases: dict[tuple[str, str], set[Code]] = {}  # by engine and transfer

    @property
    def num_delivered(self) -> int:
        """How many pulls were delivered."""
        return sum(number for end, number in self.ends.items() if end.code is None)

    def released(self, engine: str, transfer_id: str, why: Code) -> None:
        """A transfer was released."""
        self.releases.setdefault((engine, transfer_id), set()).add(why)


def wrong_in_history(reply: bytes, heard: Heard, *, is_whole: bool) -> Iterator[str]:
    """Yield what is wrong in a reply. `is_whole`: the daemon has lived, and heard, as long as the engines."""
    records = [record_from_json(record) for record in json.loads(reply)["records"]]
    recorded: Counter[End] = Counter()
    for record in records:
        match record:
            case PullRecord():
                yield from _wrong_in_pull(record)
                recorded[_end_of(record)] += 1
            case ReleaseRecord():
                yield from _wrong_in_release(record, heard)
    if is_whole and len(records) < LIMIT:
        only_heard, only_recorded = heard.ends - recorded - heard.of_clients, recorded - heard.ends
        # The daemon's word of a pull's end may come when its client has failed the pull by itself.
        failed_there = {end[:3] for end in heard.of_clients}
        if only_heard or any(end[:3] not in failed_there for end in only_recorded):
            yield f"only recorded: {only_recorded}; only heard: {only_heard}"


def _end_of(record: PullRecord) -> End:
    end = End(record.transfer_id, record.sink, record.rank, record.code)
    return end if record.code else end._replace(num_bytes=record.bytes, num_runs=record.runs)


def _wrong_in_pull(record: PullRecord) -> Iterator[str]:
    what = f"the record of {record.transfer_id} for {record.sink} {record.rank}"
    phases = record.phases_s
    if phases.keys() - set(PHASES) or min(phases.values(), default=0.0) < 0:
        yield f"{what} has phases {phases}"
    if abs(sum(phases.values()) - record.total_s) > ROUNDING_S * (1 + record.total_s):
        yield f"{what}: {phases} do not add up to {record.total_s}"
    is_delivered = record.outcome == "delivered"
    if is_delivered == bool(record.failed_phase) or is_delivered == (record.code is not None):
        yield f"{what} is {record.outcome}, {record.code} in {record.failed_phase!r}"
    if record.code == Code.DEADLINE and record.message.startswith("cannot pull") and not record.silent:
        yield f"{what} names nobody: {record.message}"
    for phase in ("handshake", "grant"):
        if f" passed in {phase}: " in record.message and record.failed_phase != phase:
            yield f"{what} failed in {record.failed_phase!r}: {record.message}"
    if is_delivered and (sum(record.ways.values()) != record.bytes or record.hidden_bytes > record.bytes):
        yield f"{what} counts {record.ways} and {record.hidden_bytes} hidden of {record.bytes} bytes"
    # Of one that its client calls delivered, by a mover that died since, the times died too.
    if is_delivered and record.bytes and not (record.retried or phases.get("wire") or phases.get("post")):
        yield f"{what} has read {record.bytes} bytes in no time"


def _wrong_in_release(record: ReleaseRecord, heard: Heard) -> Iterator[str]:
    what = f"the record of {record.engine_id}'s {record.transfer_id}"
    whys = heard.releases.get((record.engine_id, record.transfer_id), {record.why})
    # A client that was cut off has ended its transfers by itself, or hears of their end without its reason.
    unheard = {Code.RANK_LOST, Code.SUSPENDED, Code.CANCELLED, Code.ABANDONED}
    is_lost = record.why in unheard and whys == {Code.LEASE_EXPIRED}
    is_cut_off = is_lost or record.why == Code.PUBLISHER_GONE
    own_acts = {Code.RELEASED, Code.UNPUBLISHED, Code.SUSPENDED}  # a daemon that stood still heard too late
    if whys.isdisjoint(own_acts | {record.why}) and not is_cut_off:
        yield f"{what} says {record.why}, and its engine heard {sorted(whys)}"
    if record.held_s < 0 or sum(reader.bytes for reader in record.readers) > record.bytes:
        yield f"{what} is held {record.held_s} s, and {record.readers} read {record.bytes} bytes"
