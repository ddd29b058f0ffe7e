"""A rank of an engine without a model, in a process of its own, at a real daemon."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvxferd.errors import Code
from kvxferd.ids import Rank
from kvxferd.layout.presets import LayerKind, ModelFacts, StateComponent, key_and_value
from kvxferd.tooling.child_process import ChildError, ChildProcess
from kvxferd.tooling.content import RequestBlocks
from kvxferd.tooling.daemon_process import DaemonProcess
from kvxferd.tooling.engine_pair import ROLES, EnginePair, EngineShape, Role
from kvxferd.tooling.engine_process import EngineRank
from kvxferd.tooling.owned_process import stop_all
from tests.support.tool_process import tool_directory

pytestmark = pytest.mark.slow

PAIR = EnginePair(
    model=ModelFacts("small", 2, (LayerKind.FULL,) * 2, key_and_value(2, 16)),
    prefill=EngineShape(tp=1, pp=1, block_tokens=8, layout="HND"),
    decode=EngineShape(tp=1, pp=1, block_tokens=16, layout="NHD"),
    num_tokens=70,
    name="test",
)
HYBRID = EnginePair(
    model=ModelFacts(
        *("hybrid", 2, (LayerKind.STATE, LayerKind.FULL)),
        token_arrays=key_and_value(2, 16),
        states=(StateComponent("conv.x", 2, 8, 3, is_convolution=True), StateComponent("ssm", 2, 96)),
    ),
    prefill=EngineShape(tp=1, pp=1, block_tokens=16, layout="HND"),
    decode=EngineShape(tp=1, pp=1, block_tokens=16, layout="HND"),
    num_tokens=70,
    name="hybrid",
)


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with tool_directory() as place:
        daemon = DaemonProcess(place / "node", ["--mover-pool-size", "2"])
        try:
            daemon.wait_ready()
            yield daemon
        finally:
            assert daemon.stop() == 0


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[dict[Role, ChildProcess[EngineRank]]]:
    ranks = {role: ChildProcess(EngineRank, tmp_path / f"{role}.log") for role in ROLES}
    yield ranks
    stop_all(ranks.values())


def register(ranks: dict[Role, ChildProcess[EngineRank]], pair: EnginePair, daemon: DaemonProcess) -> None:
    pending = [
        ranks[role].start(EngineRank.register, daemon.worker_socket, *pair.engine(role)[Rank(0, 0)])
        for role in ROLES
    ]
    assert all(one.result() > 0 for one in pending)


def held(pair: EnginePair, role: Role, request: int = 0) -> RequestBlocks:
    return RequestBlocks(request, pair.block_ids(role, request), pair.num_tokens)


@pytest.mark.parametrize("pair", [PAIR, HYBRID], ids=lambda pair: pair.name)
def test_a_request_moves_and_every_byte_is_right(
    ranks: dict[Role, ChildProcess[EngineRank]], daemon: DaemonProcess, pair: EnginePair
) -> None:
    register(ranks, pair, daemon)
    source, sink = held(pair, "prefill"), held(pair, "decode")
    ranks["prefill"].call(EngineRank.write, source)
    ref = ranks["prefill"].call(EngineRank.publish, "t", source, num_readers=1)
    ranks["prefill"].call(EngineRank.ready, "t")
    ranks["decode"].call(EngineRank.prepare, ref)
    before = ranks["decode"].call(EngineRank.check, sink)
    assert before.wrong_items == before.checked_items > 0
    assert ranks["decode"].call(EngineRank.pull, ref, sink).bytes > 0
    after = ranks["decode"].call(EngineRank.check, sink)
    assert (after.checked_items, after.wrong_items) == (before.checked_items, 0)
    assert ranks["prefill"].call(EngineRank.await_release, ["t"]) == {"completed": 1}
    # The process goes on without its rank, and may register another.
    for rank in ranks.values():
        rank.call(EngineRank.close)
    register(ranks, pair, daemon)


def test_a_transfer_that_grows_is_read_to_its_end(
    ranks: dict[Role, ChildProcess[EngineRank]], daemon: DaemonProcess
) -> None:
    register(ranks, PAIR, daemon)
    source, sink = held(PAIR, "prefill"), held(PAIR, "decode")
    first = source._replace(ids={"full": source.ids["full"][:4]})
    rest = source._replace(ids={"full": source.ids["full"][4:]}, first_token=32)
    prefill, decode = ranks["prefill"], ranks["decode"]
    prefill.call(EngineRank.write, first._replace(num_tokens=32))
    ref = prefill.call(EngineRank.publish, "grows", first, ready_tokens=32)
    pulling = decode.start(EngineRank.pull, ref, sink, progressive=True)
    prefill.call(EngineRank.write, source, 32)
    prefill.call(EngineRank.ready, "grows", None, rest)
    assert pulling.result().bytes > 0
    assert decode.call(EngineRank.check, sink).wrong_items == 0
    assert prefill.call(EngineRank.await_release, ["grows"]) == {"completed": 1}


def test_a_failed_pull_is_its_code_and_an_abandoned_transfer_is_released(
    ranks: dict[Role, ChildProcess[EngineRank]], daemon: DaemonProcess
) -> None:
    register(ranks, PAIR, daemon)
    source, sink = held(PAIR, "prefill"), held(PAIR, "decode")
    ranks["prefill"].call(EngineRank.write, source)
    gone, abandoned = (ranks["prefill"].call(EngineRank.publish, name, source) for name in ("a", "b"))
    for name in ("a", "b"):
        ranks["prefill"].call(EngineRank.ready, name)
    ranks["prefill"].call(EngineRank.unpublish, gone)
    assert ranks["prefill"].call(EngineRank.await_release, ["a"]) == {"unpublished": 1}
    with pytest.raises(ChildError, match="cannot grant transfer a") as raised:
        ranks["decode"].call(EngineRank.pull, gone, sink)
    assert raised.value.code is Code.RELEASED
    ranks["decode"].call(EngineRank.abandon, abandoned)
    assert ranks["prefill"].call(EngineRank.await_release, ["b"]) == {"abandoned": 1}
