"""Whatever an engine passes in either raises in its own thread or can be sent: the session goes on."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvxferd.client import BlockList, Delivered, Failed, PublishRefused, RankHandle, connect
from kvxferd.client.id_range import SHORT_BYTES, SLICE_BYTES, find_out_of_range
from kvxferd.client.refs import TransferRef, read_ref
from kvxferd.errors import Code, EngineError, KvxferdError
from kvxferd.ids import GroupName, Rank, RegionId
from kvxferd.layout import PackedBlocks, RegionSpec
from kvxferd.memory.device import ResidentMemory
from kvxferd.wire import common, worker
from kvxferd.wire.limits import MAX_NAME_CHARS
from tests.support.client_harness import LAYOUT, REF, REGION, SPEC, Stage, blocks, events_of, one_event
from tests.support.scripted_daemon import WAIT_S

LONE = "a\ud800"  # a lone surrogate: Python has it, UTF-8 has not
FIELDS = msgspec.structs.asdict(REF)
TEXTS = [name for name in FIELDS if name != "traceparent"]
BAD_TEXTS = [LONE, "", "x" * (2 * MAX_NAME_CHARS + 1), 7, None, b"abc", ["x"]]
BAD_FIELDS = [(n, v) for n in TEXTS for v in BAD_TEXTS]


class Text(str):
    """A text that is not only a str."""


def forms(fields: dict[str, Any]) -> list[Any]:
    """A reference in every form that can hold these fields."""
    found: list[Any] = [fields, common.TransferRef(**fields), TransferRef(**fields)]
    try:
        text = msgspec.json.encode(fields)
    except (TypeError, ValueError, OverflowError):
        return found
    return [*found, text, text.decode()]


@pytest.mark.parametrize(
    ("name", "value"), [pytest.param(*bad, id=f"{bad[0]} {n}") for n, bad in enumerate(BAD_FIELDS)]
)
def test_a_reference_is_looked_at_whole_in_every_form(name: str, value: object) -> None:
    for form in forms(FIELDS | {name: value}):
        if isinstance(form, bytes | str) and isinstance(value, bytes):
            continue  # JSON holds bytes as a text
        with pytest.raises(EngineError, match="cannot read the transfer reference"):
            read_ref(form)


@pytest.mark.parametrize("form", [b"[" * 10_000, "\ud800", b"\xff", [], [("endpoint", 1)], bytearray(b"{}")])
def test_what_is_no_reference_at_all(form: Any) -> None:
    with pytest.raises(EngineError, match="cannot read the transfer reference") as refused:
        read_ref(form)
    assert refused.value.code is Code.TRANSFER_UNKNOWN


def test_what_a_reference_holds_becomes_plain() -> None:
    odd = REF.__class__(**FIELDS | {"nonce": Text(REF.nonce)})
    assert type(read_ref(odd).nonce) is str


SCRAP = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(st.characters(), max_size=300),
    st.binary(max_size=20),
    st.lists(st.integers(), max_size=3),
)
ANY_FIELDS = st.dictionaries(st.sampled_from([*FIELDS, "more"]), SCRAP, max_size=7)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changed=ANY_FIELDS, left_out=st.sets(st.sampled_from([*FIELDS]), max_size=1), form=st.integers(0, 4))
def test_any_reference_raises_here_or_can_be_sent(
    stage: Stage, changed: dict[str, Any], left_out: set[str], form: int
) -> None:
    rank = _rank_of(stage)
    fields = {name: v for name, v in (FIELDS | changed).items() if name not in left_out}
    try:
        found = forms(fields)
    except TypeError:  # no object has these fields
        found = [fields]
    ref = found[form % len(found)]
    for call, kind in (
        (lambda: rank.pull(ref, blocks(), 10, 30.0), worker.Pull),
        (lambda: rank.prepare(ref), worker.Prepare),
        (lambda: rank.abandon(ref), worker.Abandon),
    ):
        _raises_or_is_sent(stage, call, kind)


def _rank_of(stage: Stage) -> RankHandle:
    """One rank for all examples: what ended its thread once would fail those that follow."""
    if not hasattr(stage, "one_rank"):
        stage.one_rank = stage.rank()  # type: ignore[attr-defined]
    rank: RankHandle = stage.one_rank  # type: ignore[attr-defined]
    assert rank.is_connected
    return rank


def _raises_or_is_sent(stage: Stage, call: Callable[[], object], kind: type) -> None:
    try:
        call()
    except KvxferdError:
        return
    sent = stage.side.expect(kind)
    if isinstance(sent, worker.Pull):
        stage.side.say(worker.Delivered(ticket=sent.ticket, bytes=0, runs=0, wire_s=0.0))


BAD_CALLS: dict[str, Callable[[RankHandle], object]] = {
    "transfer id": lambda r: r.publish(LONE, blocks(), 10),
    "ready": lambda r: r.ready(LONE),
    "ready, no text": lambda r: r.ready(7),  # type: ignore[arg-type]
    "group": lambda r: r.publish("t", {LONE: BlockList(ids=[1])}, 10),
    "num_tokens": lambda r: r.publish("t", blocks(), 1 << 64),
    "num_tokens, endless": lambda r: r.publish("t", blocks(), 10**5000),
    "num_readers": lambda r: r.publish("t", blocks(), 10, num_readers=1 << 63),
    "first_token": lambda r: r.publish("t", blocks(first_token=1 << 64), 10),
    "state_at": lambda r: r.publish("t", {"full": BlockList(ids=[1], state_at=-(1 << 64))}, 10),
    "ids": lambda r: r.pull(REF, {"full": BlockList(ids=[1 << 40])}, 10, 30.0),
    "lease_s, nan": lambda r: r.publish("t", blocks(), 10, lease_s=math.nan),
    "lease_s, inf": lambda r: r.publish("t", blocks(), 10, lease_s=math.inf),
    "lease_s, endless": lambda r: r.publish("t", blocks(), 10, lease_s=10**400),
    "deadline_s, nan": lambda r: r.pull(REF, blocks(), 10, math.nan),
    "deadline_s, inf": lambda r: r.pull(REF, blocks(), 10, math.inf),
    "deadline_s, endless": lambda r: r.pull(REF, blocks(), 10, 1e308),
    "pull's num_tokens": lambda r: r.pull(REF, blocks(), 1 << 64, 30.0),
}


@pytest.mark.parametrize("call", BAD_CALLS.values(), ids=BAD_CALLS)
def test_what_cannot_be_sent_raises_and_leaves_nothing(
    stage: Stage, call: Callable[[RankHandle], object]
) -> None:
    rank = stage.rank()
    with pytest.raises(EngineError):
        call(rank)
    rank.publish("after", blocks(), 10)
    assert stage.side.expect(worker.Publish).transfer_id == "after"
    assert rank.poll() == []


def test_a_year_is_not_too_long_for_the_thread(stage: Stage) -> None:
    rank = stage.rank()
    year = 365 * 24 * 3600.0
    rank.publish("t", blocks(), 10, lease_s=9 * year)
    assert stage.side.expect(worker.Publish).lease_s > 8 * year
    rank.pull(REF, blocks(), 10, 9 * year)
    assert stage.side.expect(worker.Pull).deadline_s > 8 * year
    stage.side.close()  # the lease is the client's to watch now
    stage.rejoin()
    assert stage.side.expect(worker.Publish).transfer_id == "t"


@pytest.mark.parametrize("name", [LONE, "x" * 300, 7])
def test_a_name_that_cannot_be_sent(stage: Stage, name: Any) -> None:
    with pytest.raises(EngineError, match="as a client's name"):
        connect(stage.daemon.path, name=name)


def test_memory_that_cannot_be_described_raises_here(stage: Stage) -> None:
    client = stage.client()
    memory = ResidentMemory(address=1 << 70, size_bytes=LAYOUT.regions[0].size_bytes, device="")
    with pytest.raises(EngineError, match="region"):
        client.register(SPEC, LAYOUT, {REGION: memory}, WAIT_S, launch=lambda *_: pytest.fail("launched"))
    many = tuple(RegionSpec(RegionId(f"{n}" * 256), 4096) for n in range(1, 10))
    layout = msgspec.structs.replace(LAYOUT, tensors=LAYOUT.tensors * 5000, regions=many)
    with pytest.raises(EngineError, match="bytes"):
        client.register(SPEC, layout, {r.region: stage.memory for r in many}, WAIT_S)
    registering = stage.calling(client.register, SPEC, LAYOUT, {REGION: stage.memory}, WAIT_S)
    stage.side.register(stage.new_mover())
    assert registering.result(WAIT_S).is_connected


# --- block ids that their group does not have never leave the client


FULL = GroupName("full")
LONG = SHORT_BYTES // 4 + 1
INT32 = st.one_of(st.integers(-(2**31), 2**31 - 1), st.integers(-2, 40))


def first_outside(ids: list[int], num_blocks: int) -> int | None:
    return next((one for one in ids if one < 0 or one >= num_blocks), None)


@given(st.lists(INT32, max_size=40), st.one_of(st.integers(1, 40), st.integers(2**31 - 3, 2**31)))
def test_the_first_id_outside_is_found(ids: list[int], num_blocks: int) -> None:
    packed = {FULL: PackedBlocks(array("i", ids).tobytes())}
    found = [one for one in find_out_of_range(packed, {FULL: num_blocks}) if one is not None]
    bad = first_outside(ids, num_blocks)
    # A slice is judged as a whole: what is named is the first of it.
    assert found == ([] if bad is None else [(FULL, bad)])


@pytest.mark.parametrize("at", [0, SLICE_BYTES // 4 - 1, SLICE_BYTES // 4, 3 * SLICE_BYTES // 4])
@pytest.mark.parametrize("bad", [-1, -(2**31), 16, 2**31 - 1])
def test_in_any_slice(at: int, bad: int) -> None:
    ids = array("i", [15] * (SLICE_BYTES + 5))
    ids[at] = bad
    *good, found = find_out_of_range({FULL: PackedBlocks(memoryview(ids).cast("B"))}, {FULL: 16})  # type: ignore[arg-type]
    assert found == (FULL, bad)
    assert good == [None] * (at // (SLICE_BYTES // 4))
    assert list(find_out_of_range({FULL: PackedBlocks(ids.tobytes())}, {})) == []


def long_list(bad: int = 3, *, borrowed: bool = False) -> dict[str, BlockList]:
    ids = array("i", [1] * LONG)
    ids[-1] = bad
    return {"full": BlockList(ids=ids, borrowed=borrowed)}


def test_a_short_list_is_refused_at_once(stage: Stage) -> None:
    rank = stage.rank()
    for bad in (-1, 16):
        with pytest.raises(
            EngineError, match=f"cannot pull req-1: block {bad} of group 'full': its ids are 0 to 15"
        ) as e:
            rank.pull(REF, blocks(1, bad), num_tokens=32, deadline_s=30)
        assert e.value.code is Code.BLOCKS_INVALID
        with pytest.raises(EngineError, match=f"cannot publish 't': block {bad} of group"):
            rank.publish("t", blocks(1, bad), num_tokens=32)
    assert stage.side.is_silent()
    rank.publish("t", blocks(0, 15), num_tokens=32)  # the id is not used up
    stage.side.expect(worker.Publish)


@pytest.mark.parametrize("borrowed", [False, True])
def test_a_long_list_is_refused_by_an_event(stage: Stage, borrowed: bool) -> None:
    rank = stage.rank()
    ticket = rank.pull(REF, long_list(16, borrowed=borrowed), num_tokens=LONG * 16, deadline_s=30)
    failed = one_event(rank)
    assert isinstance(failed, Failed)
    assert (failed.ticket, failed.code, failed.safe_to_reuse) == (ticket, Code.BLOCKS_INVALID, True)
    assert "block 16 of group 'full'" in failed.message
    assert len(list(memoryview(failed.blocks["full"].ids))) == LONG
    rank.publish("t", long_list(-7, borrowed=borrowed), num_tokens=LONG * 16)
    refused = one_event(rank)
    assert isinstance(refused, PublishRefused)
    assert (refused.transfer_id, refused.code) == ("t", Code.BLOCKS_INVALID)
    assert stage.side.is_silent()
    rank.publish("t", blocks(1), num_tokens=16)
    stage.side.expect(worker.Publish)


def test_requests_keep_their_order_around_long_lists(stage: Stage) -> None:
    rank = stage.rank()
    rank.publish("first", long_list(), num_tokens=LONG * 16)
    rank.publish("bad", long_list(99), num_tokens=LONG * 16)
    rank.publish("second", blocks(1), num_tokens=16)
    ticket = rank.pull(REF, long_list(), num_tokens=LONG * 16, deadline_s=30)
    assert [stage.side.expect(worker.Publish).transfer_id for _ in range(2)] == ["first", "second"]
    pull = stage.side.expect(worker.Pull)
    stage.side.say(worker.Delivered(ticket=pull.ticket, bytes=1, runs=1, wire_s=0.1))
    events = {type(one): one for one in events_of(rank, 2)}
    assert events[Delivered].ticket is ticket  # type: ignore[attr-defined]
    assert events[PublishRefused].transfer_id == "bad"  # type: ignore[attr-defined]


def test_a_pull_that_is_cancelled_before_its_check(stage: Stage) -> None:
    """No daemon is there: nothing was sent, so it ends at once, and the check of it later changes nothing."""
    rank = stage.rank()
    stage.daemon.stop()
    while rank.is_connected:
        pass
    ticket = rank.pull(REF, long_list(99), num_tokens=LONG * 16, deadline_s=30)
    ticket.cancel()
    failed = one_event(rank)
    assert isinstance(failed, Failed)
    assert (failed.code, failed.safe_to_reuse) == (Code.CANCELLED, True)
    rank.publish("kept", long_list(), num_tokens=LONG * 16)
    rank.publish("bad", long_list(99), num_tokens=LONG * 16)
    stage.daemon.start()
    stage.rejoin()
    assert stage.side.expect(worker.Publish).transfer_id == "kept"
    refused = one_event(rank)
    assert isinstance(refused, PublishRefused)
    assert stage.side.is_silent()


def test_a_scheduler_knows_no_groups(stage: Stage) -> None:
    """Only the engine's ranks have layouts: the daemon checks."""
    stage.publisher((Rank(0, 0), "first")).publish("t", blocks(99), num_tokens=16)
    stage.side.expect(worker.Publish)
