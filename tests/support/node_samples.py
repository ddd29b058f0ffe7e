"""A node as tests of what shows it need one: nothing empty, no two numbers alike."""

from collections.abc import Iterator
from typing import Any

from kvxferd.config import Config, LoadedConfig, settings_in_effect
from kvxferd.control.node_admin import ReloadResult
from kvxferd.core.ranks.owners import Disownable
from kvxferd.errors import Code, EngineError
from kvxferd.ids import (
    AgentName,
    BootId,
    Endpoint,
    EngineId,
    EngineKey,
    Generation,
    GrantId,
    PullId,
    Rank,
    TransferId,
)
from kvxferd.layout import EngineSpec, RankLayout
from kvxferd.layout.presets import deploy
from kvxferd.plan import TransferTopology
from kvxferd.records import (
    EngineSnapshot,
    HandshakeRecord,
    HolderSnapshot,
    LimitSnapshot,
    NodeSnapshot,
    OwnershipSnapshot,
    PeerSnapshot,
    PlacementRecord,
    PlacementSnapshot,
    PullRecord,
    PullSnapshot,
    RankSnapshot,
    ReaderRecord,
    Record,
    ReleaseRecord,
    RemoteEngineSnapshot,
    TransferSnapshot,
    TransportsRecord,
    TransportsSnapshot,
)
from kvxferd.telemetry.history import History
from kvxferd.telemetry.samples import Samples
from kvxferd.telemetry.warnings import NodeWarning, WarningKind
from tests.support.fetched_engine import register

SOURCE = EngineId("prefill-0")
SINK = EngineId("decode-0")
PEER = Endpoint("tcp://10.0.0.2:9441")
# The limits that are shown beside their use: settings, and two that are none.
LIMIT_NAMES = (
    *("max_sessions", "max_ranks", "max_transfers_per_engine", "max_pulls_per_rank", "max_inflight_bytes"),
    *("max_peers", "staging_bytes", "block_id_bytes", "waiting_bytes"),
)


def rank_snapshot(rank: Rank, state: str = "ready") -> RankSnapshot:
    """A rank of 3 MiB over layers 0 to 16; a ready one is read by CMA, and over TCP by one of its node."""
    agent = AgentName(f"boot-a/{rank}")
    is_ready = state == "ready"
    return RankSnapshot(
        rank=rank,
        state=state,
        agent=agent,
        library="nixl 1.5.1",
        bytes=3 << 20,
        layers=(0, 16),
        placement=PlacementSnapshot(kind="direct", proved=True, why="", lanes="cma", gigabytes_per_s=4.75)
        if is_ready
        else None,
        lanes=(_lanes("itself", "cma/memory"), _lanes("node", "tcp/lo")) if is_ready else (),
    )


def _lanes(reach: str, transport: str) -> TransportsSnapshot:
    return TransportsSnapshot(
        reach=reach, transports=(transport,), lanes=transport.partition("/")[0], slow=reach == "node"
    )


def node_snapshot(*, draining: bool = False) -> NodeSnapshot:
    """One whole engine, one that lacks a rank, a peer, two transfers and a pull."""
    whole = EngineSnapshot(
        engine_id=SINK,
        generation=Generation("g1"),
        pp_size=1,
        tp_size=2,
        num_layers=16,
        complete=True,
        lacking=(),
        home=Endpoint("tcp://10.0.0.1:9441"),
        ranks=(rank_snapshot(Rank(0, 0)), rank_snapshot(Rank(0, 1))),
    )
    lacking = EngineSnapshot(
        engine_id=EngineId("<b>odd</b>"),
        generation=Generation("g2"),
        pp_size=2,
        tp_size=1,
        num_layers=32,
        complete=False,
        lacking=(Rank(1, 0),),
        home=Endpoint("tcp://10.0.0.1:9441"),
        ranks=(rank_snapshot(Rank(0, 0), "mapping"),),
    )
    remote = RemoteEngineSnapshot(engine_id=SOURCE, generation=Generation("g7"), num_ranks=8)
    return NodeSnapshot(
        boot=BootId("boot-a"),
        endpoint=Endpoint("tcp://10.0.0.1:9441"),
        draining=draining,
        num_sessions=5,
        num_quarantined=4,
        quarantined_bytes=6 << 20,
        engines=(whole, lacking),
        peers=(
            PeerSnapshot(
                endpoint=PEER,
                boot=BootId("boot-b"),
                state="up",
                engines=(remote,),
                num_grants=7,
                round_trip_s=0.0011,
                last_reply_s=1.75,
            ),
        ),
        transfers=(_transfer("req-1", "granted", 2), _transfer("req-2", "writing", 0)),
        transfer_states={"granted": 1, "writing": 1},
        published_bytes=5 << 20,
        oldest_published_s=41.5,
        limits=tuple(
            LimitSnapshot(name=name, limit=10 * number, used=number)
            for number, name in enumerate(LIMIT_NAMES, 101)
        ),
        num_grants_given=2,
        num_grants_held=7,
        pull_phases={"posted": 1},
        num_retired_movers=3,
        ownerships=(
            OwnershipSnapshot(engine_id=SINK, uid=1000, expires_in_s=None),
            OwnershipSnapshot(engine_id=EngineId("gone-0"), uid=1001, expires_in_s=312.0, num_kept_ranks=2),
        ),
        pulls=(
            PullSnapshot(
                pull=PullId(9),
                transfer_id=TransferId("req-3"),
                source=SOURCE,
                sink=SINK,
                rank=Rank(0, 1),
                phase="wire",
                grant=GrantId("grant-1"),
                age_s=0.25,
                deadline_left_s=29.75,
                progressive=True,
                num_tokens=1000,
                tokens_read=256,
                bytes_read=8 << 20,
            ),
        ),
    )


def _transfer(name: str, state: str, num_grants: int) -> TransferSnapshot:
    return TransferSnapshot(
        transfer_id=TransferId(name),
        engine_id=SINK,
        generation=Generation("g1"),
        state=state,
        num_tokens=1000,
        num_grants=num_grants,
        holders=(
            HolderSnapshot(engine_id=SOURCE, peer=Endpoint("tcp://10.0.0.8:9441"), num_grants=1, held_s=4.25),
        )
        * bool(num_grants),
        num_acks=1,
        lease_left_s=12.5,
        age_s=17.5,
        ready_tokens=512 if state == "writing" else 1000,
    )


def pull_record(outcome: str = "delivered", code: Code | None = None) -> PullRecord:
    """A pull of 1 MiB that took 12 ms."""
    return PullRecord(
        pull=PullId(8),
        transfer_id=TransferId("req-0"),
        source=SOURCE,
        sink=SINK,
        rank=Rank(0, 1),
        outcome=outcome,
        code=code,
        message="cannot pull" if code else "",
        bytes=1 << 20,
        runs=64,
        total_s=0.012,
        phases_s={"queue": 0.001, "wire": 0.01},
        ways={"direct": 1 << 18, "covering": 3 << 18},
        predicted_s=0.009,
        peer=PEER,
        failed_phase="grant" if code else "",
        silent="10.0.0.2:9441" if code is Code.DEADLINE else "",
        ended_at=1_800_000_000.512,
        started_at=1_800_000_000.5,
    )


def records() -> list[Record]:
    """One of each kind, and a pull that failed."""
    return [
        HandshakeRecord(peer=PEER, engine_id=SOURCE, outcome="ok", message="", num_ranks=8, elapsed_s=0.004),
        pull_record(),
        pull_record("failed", Code.LEASE_EXPIRED),
        ReleaseRecord(
            transfer_id=TransferId("req-5"),
            engine_id=SINK,
            why=Code.COMPLETED,
            held_s=1.5,
            readers=(ReaderRecord(engine_id=SOURCE, peers=(PEER,), num_ranks=2, bytes=5 << 20),),
            bytes=5 << 20,
        ),
        PlacementRecord(
            engine_id=SINK,
            rank=Rank(0, 1),
            placement="direct",
            proved=True,
            why="",
            lanes="cma",
            gigabytes_per_s=4.75,
        ),
        TransportsRecord(engine_id=SINK, rank=Rank(0, 1), reach="node", lanes="tcp", slow=True),
    ]


def samples(pull: PullRecord | None = None) -> Samples:
    """Three slots, the second of which is missing: the pulls of `records`, one that was read here, `pull`."""
    now = 105.0
    found = Samples(lambda: now, lambda: 1_700_000_000.0 + now)
    for record in records():
        found.add(record)
    found.add_served(1 << 20)
    found.tick()
    now = 125.0
    found.tick()
    found.add(pull or pull_record())
    return found


def node_warning(text: str, kind: WarningKind = WarningKind.PEER_SOCKET_OPEN) -> NodeWarning:
    """A warning that began in 2026."""
    message, _, remedy = text.partition("; ")
    return NodeWarning(kind, "", message, remedy, since=1_790_000_000.0)


class StillNode:
    """A node that never changes, but for being drained: what `HttpServer` asks of one."""

    config_path = "/etc/kvxferd/kvxferd.toml"

    @staticmethod
    def settings() -> dict[str, dict[str, Any]]:
        """The defaults, one of which was given."""
        return settings_in_effect(LoadedConfig(Config(), {"transfer.lease_s": "flag --transfer-lease-s"}))

    def __init__(self, reasons: list[str] | None = None) -> None:
        self.reasons = reasons or []
        self.warned: list[str] = []
        self.draining = False

    def snapshot(self) -> NodeSnapshot:
        """The sample."""
        return node_snapshot(draining=self.draining)

    def snapshot_steps(self) -> Iterator[NodeSnapshot | None]:
        """The sample, in two steps."""
        yield None
        yield self.snapshot()

    def readiness(self) -> list[str]:
        """As given."""
        return self.reasons

    def warnings(self) -> list[NodeWarning]:
        """As given, each of the same kind."""
        return [node_warning(text) for text in self.warned]

    def drop_peer(self, endpoint: str) -> list[Endpoint]:
        """The one that it knows."""
        return [PEER] if endpoint == PEER else []

    def disown(self, engine_id: EngineId) -> Disownable:
        """One that has no ranks here."""
        if engine_id == SINK:
            raise EngineError("cannot disown engine: ranks of it are registered here", Code.RANK_TAKEN)
        return Disownable(1000, 2) if engine_id == "gone-0" else Disownable(None, 0)

    def cancel_transfer(self, transfer_id: TransferId, engine_id: EngineId | None) -> list[EngineKey]:
        """Of the one engine that publishes."""
        live = [t for t in node_snapshot().transfers if t.transfer_id == transfer_id]
        return [EngineKey(t.engine_id, t.generation) for t in live if engine_id in (None, t.engine_id)]

    def cancel_pull(self, number: PullId) -> bool:
        """The one that runs."""
        return number in [pull.pull for pull in node_snapshot().pulls]

    async def wait_drained(self) -> NodeSnapshot:
        """At once, with everything left."""
        return self.snapshot()

    def records(self) -> list[Record]:
        """The sample."""
        return records()

    @property
    def history(self) -> History:
        """Of its records."""
        history = History()
        for record in self.records():
            history.add(record)
        return history

    @property
    def samples(self) -> Samples:
        """Three slots, the second of which is missing."""
        return samples()

    def layouts(self, engine_id: EngineId) -> list[tuple[EngineSpec, RankLayout]]:
        """A tiny prefill engine, whole."""
        return list(deploy("tiny-dense", tp=2, engine_id=SOURCE).values()) if engine_id == SOURCE else []

    def topologies(self) -> list[dict[str, Any]]:
        """A hybrid, and a pair in two stages whose sizes do not divide."""
        hybrid = TransferTopology(*deploy("tiny-mamba2", engine_id="decode-0")[Rank(0, 0)])
        register(hybrid, deploy("tiny-mamba2", tp=2, engine_id=SOURCE))
        uneven = TransferTopology(*deploy("tiny-dense", tp=3, engine_id="decode-0")[Rank(0, 1)])
        register(uneven, deploy("tiny-dense", tp=2, pp=2, block_tokens=24, engine_id=SOURCE))
        stages = [(hybrid, 0, 12.5), (uneven, 0, 3.25), (uneven, 1, 3.25)]
        return [{**made.terms(SOURCE, stage), "last_used_s": used_s} for made, stage, used_s in stages]

    def reload(self) -> ReloadResult:
        """One of each."""
        return ReloadResult(
            changed=["log.level"],
            ignored=["http.bind"],
            dropped_peers=[PEER],
            closed_sessions=2,
            closes_connections=True,
        )

    def drain(self) -> None:
        """Be drained."""
        self.draining = True
