"""Whatever an engine passes in either raises in its own thread or can be sent: the session goes on."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxferd.client import BlockList, RankHandle, TransferRef, connect
from kvxferd.errors import Code, EngineError
from kvxferd.ids import RegionId
from kvxferd.layout import RegionSpec
from kvxferd.memory.device import ResidentMemory
from kvxferd.wire import worker
from kvxferd.wire.codec import CLIENT_MESSAGES, encode
from kvxferd.wire.limits import MAX_NAME_CHARS
from tests.support.client_harness import LAYOUT, REF, REGION, SPEC, Stage, blocks
from tests.support.scripted_daemon import WAIT_S

LONE = "a\ud800"  # a lone surrogate: Python has it, UTF-8 has not
FIELDS = msgspec.structs.asdict(REF)
TEXTS = [name for name in FIELDS if name != "traceparent"]
BAD_TEXTS = [LONE, "", "x" * (2 * MAX_NAME_CHARS + 1), 7, None, b"abc", ["x"]]
BAD_FIELDS = [(n, v) for n in TEXTS for v in BAD_TEXTS]
BAD_REF = TransferRef(**FIELDS | {"nonce": LONE})


def forms(fields: dict[str, Any]) -> list[Any]:
    """A reference in every form that can hold these fields."""
    found: list[Any] = [fields, TransferRef(**fields)]
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
            TransferRef.parse(form)


@pytest.mark.parametrize("form", [b"[" * 10_000, "\ud800", b"\xff", [], [("endpoint", 1)], bytearray(b"{}")])
def test_what_is_no_reference_at_all(form: Any) -> None:
    with pytest.raises(EngineError, match="cannot read the transfer reference") as refused:
        TransferRef.parse(form)
    assert refused.value.code is Code.TRANSFER_UNKNOWN


def test_what_a_reference_holds_becomes_plain() -> None:
    class Text(str):
        """A text that is not only a str."""

    odd = TransferRef(**FIELDS | {"nonce": Text(REF.nonce)})
    assert type(TransferRef.parse(odd).nonce) is str


SCRAP = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=300) | st.binary(max_size=20)
)
ANY_FIELDS = st.dictionaries(st.sampled_from([*FIELDS, "more"]), SCRAP, max_size=7)


@given(changed=ANY_FIELDS, left_out=st.sets(st.sampled_from([*FIELDS]), max_size=1))
def test_any_reference_raises_here_or_can_be_sent(changed: dict[str, Any], left_out: set[str]) -> None:
    fields = {name: v for name, v in (FIELDS | changed).items() if name not in left_out}
    try:
        found = forms(fields)
    except TypeError:  # no object has these fields
        found = [fields]
    for form in found:
        try:
            ref = TransferRef.parse(form)
        except EngineError:
            continue
        sent = CLIENT_MESSAGES.decode(encode(worker.Prepare(ref=ref)))
        assert sent.ref == ref


BAD_CALLS: dict[str, Callable[[RankHandle], object]] = {
    "transfer id": lambda r: r.publish(LONE, blocks(), 10),
    "transfer id, none": lambda r: r.publish("", blocks(), 10),
    "transfer id, long": lambda r: r.publish("x" * 300, blocks(), 10),
    "group, unknown": lambda r: r.publish("t", {"sliding": BlockList(ids=[1])}, 10),
    "num_tokens, none": lambda r: r.publish("t", blocks(), 0),
    "num_tokens, half": lambda r: r.publish("t", blocks(), 1.5),  # type: ignore[arg-type]
    "num_readers, none": lambda r: r.publish("t", blocks(), 10, num_readers=0),
    "lease_s, negative": lambda r: r.publish("t", blocks(), 10, lease_s=-1.0),
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
    "pull's reference": lambda r: r.pull(BAD_REF, blocks(), 10, 30.0),
    "prepare's reference": lambda r: r.prepare(BAD_REF),
    "abandon's reference": lambda r: r.abandon(BAD_REF),
}


@pytest.mark.parametrize("call", BAD_CALLS.values(), ids=BAD_CALLS)
def test_what_cannot_be_sent_raises_and_leaves_nothing(
    stage: Stage, call: Callable[[RankHandle], object]
) -> None:
    rank = stage.rank()
    with pytest.raises(EngineError):
        call(rank)
    stage.publish(rank, "after")
    assert rank.poll() == []


def test_a_year_is_not_too_long_for_the_thread(stage: Stage) -> None:
    rank = stage.rank()
    year = 365 * 24 * 3600.0
    assert stage.publish(rank, "t", lease_s=9 * year).lease_s > 8 * year
    rank.pull(REF, blocks(), 10, 9 * year)
    assert stage.side.expect(worker.PullRequest).deadline_s > 8 * year
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
    registering = stage.registering(client)
    stage.side.register(stage.new_mover())
    assert registering.result(WAIT_S).is_connected
