"""The plans of a node: shared, charged to users, kept for grants that read by them, refused, evicted."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxferd.core import Settings
from kvxferd.core.context import NodeContext
from kvxferd.core.effects import MakePlan
from kvxferd.core.limits.ledger import RESERVE_DIVISOR, SMALL_DIVISOR
from kvxferd.core.limits.table import PLAN_BYTES
from kvxferd.core.peers.remote_engine import RemoteEngine
from kvxferd.core.ranks.registry import LocalRank
from kvxferd.core.sink import plans as core_plans
from kvxferd.core.sink.grants import HeldGrant
from kvxferd.core.sink.plans import Plans
from kvxferd.errors import BusyError, Code, EngineError, PlanError
from kvxferd.ids import AgentName, BootId, Endpoint, EngineId, Incarnation, SessionId
from kvxferd.plan import PlanJob, PlannedReads, plan_bytes
from kvxferd.wire.common import Binding, RankManifest
from tests.support.attention_engines import engine
from tests.support.fetched_engine import grant_of, learnt, outcome_of

SIZE = 4096 + 1024 + 320 + 4 * 148  # of each of the plans below: K and V of two layers
BINDING = Binding(AgentName("a"), b"", (), Incarnation("i"))


def source(number: int, layers: int = 2, engine_id: str = "", block_tokens: int = 4) -> RemoteEngine:
    """Return an engine whose plan is like no other's: one plan for each number."""
    ((rank, (spec, layout)),) = engine(layers=layers, block_tokens=block_tokens).items()
    groups = tuple(msgspec.structs.replace(group, num_blocks=1000 + number) for group in layout.groups)
    spec = msgspec.structs.replace(spec, engine_id=EngineId(engine_id or f"remote-{number}"))
    return learnt({rank: RankManifest(spec, msgspec.structs.replace(layout, groups=groups), BINDING)})


class Node:
    """A node's plans, a rank of each user, and a shell that plans at once."""

    def __init__(self, num_plans: int) -> None:
        """`num_plans`: for so many there is room."""
        self.context = NodeContext(
            boot=BootId("b"), endpoint=Endpoint("tcp://d:9441"), settings=Settings(), new_token=str
        )
        self.share = self.context.ledger[PLAN_BYTES]
        self.share.limit = num_plans * SIZE
        self.plans = Plans(self.context)
        self.ranks: dict[int, LocalRank] = {}
        self.grants: list[HeldGrant] = []  # that read
        self.num_planned = 0

    def grant(self, remote: RemoteEngine, uid: int = 0) -> HeldGrant:
        """Return a grant by which a user's rank is to read."""
        if uid not in self.ranks:
            ((spec, layout),) = engine().values()
            self.ranks[uid] = LocalRank(SessionId(uid), spec, layout, (), Incarnation("i"), 0, uid)
        return grant_of(self.ranks[uid], remote)

    def jobs(self) -> list[PlanJob]:
        """Return what the shell has been told to plan."""
        return [effect.job for effect in self.context.pop_effects() if isinstance(effect, MakePlan)]

    def find(self, grant: HeldGrant, remote: RemoteEngine) -> PlannedReads | None:
        """Have a grant read; None: it is being planned."""
        if (reads := self.plans.acquire(grant, remote)) is not None:
            grant.remote, grant.reads = remote, reads
            self.grants.append(grant)
        self.plans.check_integrity(self.grants)
        return reads

    def read(self, number: int, uid: int = 0, **facts: int | str) -> HeldGrant:
        """Return a grant by which a user's rank reads an engine, planned now unless it is known."""
        remote = source(number, **facts)  # type: ignore[arg-type]
        grant = self.grant(remote, uid)
        if self.find(grant, remote) is None:
            (job,) = self.jobs()
            self.num_planned += 1
            assert self.plans.plan_made(job, outcome_of(job)) == [grant]
            assert self.find(grant, remote) is not None
        return grant

    def end(self, *grants: HeldGrant) -> None:
        """End some grants."""
        for grant in grants:
            assert grant.reads is not None
            self.plans.release(grant.reads)
            grant.reads = None
            self.grants.remove(grant)
        self.plans.check_integrity(self.grants)

    def use(self, number: int, uid: int = 0) -> bool:
        """Read an engine to the end; return whether its plan was there."""
        before = self.num_planned
        self.end(self.read(number, uid))
        return self.num_planned == before


def test_ranks_with_equal_layouts_share_a_plan() -> None:
    """Of other users too, and of other engines that are alike; it is charged once."""
    node = Node(32)
    first = node.read(0)
    assert node.read(0, uid=1, engine_id="other").reads is first.reads
    assert node.num_planned == 1
    assert first.reads is not None
    assert plan_bytes(first.reads.plan) == node.share.held == node.share.held_by(0) == SIZE


def test_the_longest_unused_plan_of_a_user_is_evicted_first() -> None:
    node = Node(8)
    assert [node.use(number) for number in range(7)] == 7 * [False]
    assert node.use(0)
    assert not node.use(7)
    assert node.use(0)
    assert not node.use(1)


def test_a_user_with_ever_new_plans_evicts_its_own() -> None:
    node = Node(64)
    for number in range(8):
        node.use(number, uid=1)
    for number in range(100, 300):
        node.use(number, uid=2)
    assert [node.use(number, uid=1) for number in range(8)] == 8 * [True]


def test_grants_keep_the_plans_that_they_read_by() -> None:
    """What has no room is refused, and not planned again for the next request."""
    node = Node(8)
    grants = [node.read(number) for number in range(7)]
    with pytest.raises(BusyError, match="cannot keep a plan to read remote-7 of 6032 bytes: ") as caught:
        node.read(7)
    assert caught.value.retry_after_s == 1.0
    with pytest.raises(BusyError):
        node.find(node.grant(source(7)), source(7))
    assert not node.jobs()
    assert node.read(0).reads is grants[0].reads
    node.end(grants[0])
    with pytest.raises(BusyError):
        node.read(7)
    node.end(node.grants[-1])  # the other one that read by the first plan
    assert node.read(7).reads is not None
    with pytest.raises(BusyError):
        node.read(0)


def test_a_plan_goes_to_the_first_who_waits_and_has_room() -> None:
    """Also where who came first has none."""
    node, remote = Node(16), source(100)
    full = [node.read(number) for number in range(14)]
    grants = [node.grant(remote, uid) for uid in (0, 1)]
    for grant in grants:
        node.find(grant, remote)
    (job,) = node.jobs()
    node.plans.plan_made(job, job.make())
    assert node.share.held_by(1) == SIZE
    assert all(node.find(grant, remote) is not None for grant in grants)
    assert len(full) == 14


# --- refusals


def test_a_refusal_is_kept_and_costs_no_planning() -> None:
    """A peer with a layout that cannot be read would else cost a whole planning for each pull."""
    node = Node(32)
    texts = set()
    for _ in range(3):
        with pytest.raises(PlanError) as caught:
            node.read(0, layers=3)
        texts.add(str(caught.value))
    assert (len(texts), node.num_planned, node.share.held) == (1, 1, 0)
    assert not node.use(0)


def test_a_refusal_names_its_own_engine() -> None:
    """Of two that are alike, of two users: neither gets the other's text."""
    node = Node(32)
    for name in ("one", "two", "one"):
        with pytest.raises(PlanError, match=f"'{name}'"):
            node.read(0, layers=3, engine_id=name)
    assert node.num_planned == 2


def test_refusals_of_other_facts_end_when_the_first_ones_expire() -> None:
    """Also for a rank that reads nothing else, whose every registration is refused."""
    node, kept_s = Node(32), Settings().transfer.max_hold_s
    node.read(0, engine_id="changed")
    for node.context.now in (1.0, kept_s):
        with pytest.raises(EngineError) as caught:
            node.read(1, engine_id="changed", block_tokens=8)
        assert caught.value.code is Code.SHAPE_MISMATCH
    node.context.now = kept_s + 1.0
    assert node.read(1, engine_id="changed", block_tokens=8).reads is not None


def test_refusals_are_kept_up_to_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest unused go first."""
    monkeypatch.setattr(core_plans, "MAX_REFUSALS", 4)
    node = Node(32)
    for number in range(10):
        with pytest.raises(PlanError):
            node.read(number, layers=3)
    assert node.num_planned == 10
    for number in (9, 8, 7, 6, 5):
        assert node.num_planned == 10
        with pytest.raises(PlanError):
            node.read(number, layers=3)
    assert node.num_planned == 11


USERS = range(3)
STEPS = st.lists(
    st.tuples(st.integers(0, 60), st.sampled_from(USERS), st.booleans(), st.integers(0, 8)), max_size=120
)


@settings(deadline=None, max_examples=40)
@given(STEPS)
def test_the_limit_holds_whatever_is_read(steps: list[tuple[int, int, bool, int]]) -> None:
    """Who holds little always finds room while there is any, whatever others read by."""
    node = Node(32)
    for number, uid, stays, num_ends in steps:
        node.end(*node.grants[:num_ends])
        before = node.share.held_by(uid)
        try:
            grant = node.read(number, uid)
        except BusyError:
            reading = {grant.reads.key for grant in node.grants if grant.reads is not None}
            assert before + SIZE > 32 * SIZE // SMALL_DIVISOR or len(reading) == 32
        else:
            if not stays:
                node.end(grant)
        assert node.share.held <= 32 * SIZE
        held = Counter({user: node.share.held_by(user) for user in USERS})
        assert max(held.values()) <= 32 * SIZE - 32 * SIZE // RESERVE_DIVISOR
