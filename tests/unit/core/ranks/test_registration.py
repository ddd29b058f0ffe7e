"""Who may be a rank, and what a bad registration costs: itself."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from kvxferd.core import events as ev
from kvxferd.core.limits.table import ARRIVING_ID_BYTES
from kvxferd.core.worker_requests import MAX_PREPARED
from kvxferd.errors import Code
from kvxferd.ids import Incarnation, MoverId, SessionId
from kvxferd.layout import PackedBlocks
from kvxferd.wire import worker as wk
from kvxferd.wire.block_id_parts import BlockIdAssembly
from kvxferd.wire.common import BlockIds, Refusal, Versions
from kvxferd.wire.limits import MAX_REQUEST_IDS_BYTES
from tests.support.low_limits import lower
from tests.support.simulation import IDS, SINK_IDS, TOKENS, Worker, spec_of


def refusal(worker) -> wk.Refused:
    (refused,) = worker.received(wk.Refused)
    return refused


def test_two_workers_that_claim_one_rank(world):
    host = world.host("p")
    first = world.register(host, spec_of("e"))
    second = world.register(host, spec_of("e"))
    assert refusal(second).code is Code.RANK_TAKEN
    first.close()
    world.register_again(second)
    assert second.received(wk.Registered)


@pytest.mark.parametrize("incarnation", ["first", "second"])
def test_a_second_registration_of_a_rank_ends_its_connection(world, incarnation):
    worker = world.register(world.host("p"), spec_of("e"))
    worker.publish("t1", IDS, TOKENS)
    world.register_again(worker, incarnation, request=7)
    (farewell,) = worker.received(wk.Farewell)
    assert farewell.code is Code.OUT_OF_PLACE
    assert not worker.host.node.published.table.live


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"tp_size": 4}, Code.SHAPE_MISMATCH),
        ({"fingerprint": "other"}, Code.SHAPE_MISMATCH),
        ({"tp_rank": 2}, Code.RANK_INVALID),
        ({"engine_id": ""}, Code.RANK_INVALID),
        ({"engine_id": "x" * 300}, Code.RANK_INVALID),
        ({"home": "nonsense"}, Code.ENDPOINT_INVALID),
        ({"home": "tcp://*:1"}, Code.ENDPOINT_INVALID),
    ],
)
def test_a_rank_that_cannot_be_of_its_engine_is_refused(world, change, code):
    host = world.host("p")
    first = world.register(host, spec_of("e", tp=2))
    other = world.register_with(
        host, msgspec.structs.replace(first.spec, **{"tp_rank": 1} | change), first.layout
    )
    assert refusal(other).code is code


def test_strides_that_reach_outside_the_region(world):
    worker = world.register(world.host("p"), spec_of("e"))
    tensors = worker.layout.tensors
    wide = msgspec.structs.replace(tensors[-1], block_stride=tensors[-1].block_stride * 2)
    layout = msgspec.structs.replace(worker.layout, tensors=(*tensors[:-1], wide))
    other = world.register_with(worker.host, spec_of("other"), layout)
    assert refusal(other).code is Code.LAYOUT_INVALID


def test_what_the_shell_finds_wrong_with_the_descriptors_is_said(world):
    registered = world.register(world.host("p"), spec_of("e"))
    worker = world.connect(registered.host)
    said = wk.Register(1, spec_of("other"), registered.layout, registered.exports(), Incarnation("i"))
    problem = Refusal(Code.REGION_UNSEALED, "cannot use it")
    worker.host.feed(ev.WorkerMessage(worker.session, said, problem))
    assert refusal(worker) == wk.Refused(request=1, code=Code.REGION_UNSEALED, message="cannot use it")


def test_stages_with_a_gap_are_refused_when_the_engine_would_be_complete(world):
    host = world.host("p")
    for pp_rank, end_layer in ((0, 1), (1, 4)):
        spec = spec_of("e", pp=2, layers=4, pp_rank=pp_rank)
        model = world.register(world.host(f"model-{pp_rank}"), spec).layout
        tensors = tuple(tensor for tensor in model.tensors if tensor.layer < end_layer)
        layout = msgspec.structs.replace(model, end_layer=end_layer, tensors=tensors)
        last = world.register_with(host, spec, layout)
    assert refusal(last).code is Code.LAYERS_MISSING


def test_without_movers_the_registration_is_refused_and_the_session_lives(world):
    host = world.host("p")
    host.give_movers = False
    worker = world.register(host, spec_of("e"))
    host.feed(ev.MoverNotStarted(max(host.movers), Refusal(Code.MOVER_LOST, "no process is left")))
    assert refusal(worker).code is Code.MOVER_LOST
    host.give_movers = True
    world.register_again(worker)
    assert worker.received(wk.Registered)


def test_a_client_of_another_version_is_told_which_are_spoken(world):
    host = world.host("p")
    fresh = host.workers[999] = Worker(world, host, SessionId(999))
    host.feed(ev.WorkerConnected(fresh.session, 1, 0))
    fresh.say(wk.Hello(versions=Versions(6, 7), client="future"))
    (farewell,) = fresh.received(wk.Farewell)
    assert farewell.code is Code.BAD_VERSION
    assert "version 6 to 7: this one speaks 1" in farewell.message


@pytest.mark.parametrize(
    ("ids", "tokens"),
    [([99, 1, 2], TOKENS), ([-1, 1, 2], TOKENS), ([1, 1, 2], TOKENS), ([1], TOKENS), (IDS, 0)],
)
def test_a_bad_publish_is_refused_and_its_blocks_are_the_engines(world, ids, tokens):
    worker = world.register(world.host("p"), spec_of("e"))
    worker.publish("t1", ids, tokens)
    (refused,) = worker.received(wk.PublishRefused)
    assert refused.code is Code.BLOCKS_INVALID
    worker.publish("t1", IDS, TOKENS)
    assert len(worker.received(wk.PublishRefused)) == 1


def test_memory_is_not_resumed_while_a_mover_of_the_refused_resume_lives(world, monkeypatch):
    host = world.host("p")
    worker = world.register(host, spec_of("e"))
    worker.say(wk.Suspend())
    killed: list[MoverId] = []
    monkeypatch.setattr(host, "kill_mover", killed.append)
    worker.refuses_binds = lambda: True
    worker.resume("second", request=2)
    (mover,) = killed  # it is not dead yet
    assert not worker.received(wk.Refused)
    num_movers = len(host.movers)
    worker.resume("third", request=3)
    assert [(m.request, m.code) for m in worker.received(wk.Refused)] == [(3, Code.OUT_OF_PLACE)]
    assert len(host.movers) == num_movers
    worker.refuses_binds = lambda: False
    host.movers[mover].die()
    assert [(m.request, m.code) for m in worker.received(wk.Refused)][1:] == [(2, Code.DEVICE_ERROR)]
    worker.resume("fourth", request=4)
    assert [m.request for m in worker.received(wk.Registered)] == [1, 4]


def test_a_pull_of_a_suspended_rank_fails_at_once(source, sink):
    ref = source.publish("t1", IDS, TOKENS)
    sink.say(wk.Suspend())
    assert sink.ended(sink.pull(ref, SINK_IDS, TOKENS)).code is Code.SUSPENDED
    sink.resume()
    assert sink.reads(ref)


def test_what_was_prepared_for_another_registration_is_not_used(world, source):
    """A connection whose registration failed may register another layout; plans are per layout."""
    source.fill(IDS, TOKENS, seed=1)
    ref = source.publish("t1", IDS, TOKENS)
    host = world.host("d")
    host.give_movers = False
    sink = world.register(host, spec_of("decode"))
    sink.say(wk.Prepare(ref=ref))
    host.feed(ev.MoverNotStarted(max(host.movers), Refusal(Code.MOVER_LOST, "none")))
    host.give_movers = True
    sink.layout = world.register(world.host("other"), spec_of("decode"), "NHD").layout
    world.register_again(sink)
    assert sink.reads(ref)
    assert sink.num_wrong(SINK_IDS, TOKENS, seed=1) == 0


def test_there_is_an_end_to_what_one_session_may_prepare(world, source, sink):
    ref = source.publish("t1", IDS, TOKENS)
    world.hold_network = True
    for number in range(MAX_PREPARED + 10):
        sink.say(wk.Prepare(ref=msgspec.structs.replace(ref, transfer_id=f"t{number}")))
    assert len(list(sink.host.node.worker_requests.prepared())) == MAX_PREPARED


def test_a_fence_slot_holds_one_transfer_at_a_time(world):
    worker = world.register(world.host("p"), spec_of("e"))
    worker.publish("t1", IDS, TOKENS)
    worker.slots = itertools.count()  # the same slot again
    worker.publish("t2", IDS, TOKENS)
    (refused,) = worker.received(wk.PublishRefused)
    assert (refused.transfer_id, refused.code) == ("t2", Code.OUT_OF_PLACE)
    worker.say(wk.Unpublish(transfer_id="t1"))
    worker.slots = itertools.count()
    worker.publish("t3", IDS, TOKENS)
    assert len(worker.received(wk.PublishRefused)) == 1


@pytest.mark.parametrize("group", ["", "x" * 300])
def test_parts_without_end_cost_the_connection(world, group):
    host = world.host("p")
    worker, neighbour = world.register(host, spec_of("e")), world.connect(host)
    for number in range(300):
        worker.say(BlockIds(stream=1, group=f"{group}{number}", offset=0, ids=b""))
    assert [m.code for m in worker.received(wk.Farewell)] == [Code.BAD_FRAME]
    assert neighbour.connected


def say_parts(worker: Worker) -> None:
    """Send ten MiB of a list, in parts."""
    for part in range(10):
        worker.say(BlockIds(stream=1, group="full", offset=part << 20, ids=bytes(1 << 20)))


def test_what_arrives_in_parts_has_a_share_of_each_user(world, monkeypatch):
    """A request past it is refused, and its session lives."""
    lower(monkeypatch, ARRIVING_ID_BYTES, 16 << 20)
    host = world.host("p")
    schedulers = [world.attach(host, spec_of(f"e{number}")) for number in range(3)]
    for scheduler in schedulers:
        say_parts(scheduler)
    held = [host.node.sessions[s.session].assembly.num_bytes for s in schedulers]
    assert sum(held) <= 14 << 20
    assert held[0] == 10 << 20
    for scheduler in schedulers:
        blocks = {"full": PackedBlocks(b"")}
        publish = wk.Publish("t", "n", blocks, num_tokens=1, fence_slot=0, stream=1, incarnations=())
        scheduler.say(publish, b"x" * 16)
    codes = [m.code for s in schedulers for m in s.received(wk.PublishRefused)]
    assert codes[1:] == [Code.BUSY, Code.BUSY]
    assert all(s.connected for s in schedulers)
    assert host.node.context.ledger[ARRIVING_ID_BYTES].held == 0


def test_what_arrived_of_a_closed_session_is_freed_though_the_session_is_kept(world):
    """Until its abandoned transfer's source has replied, or for two minutes."""
    worker = world.register(world.host("p"), spec_of("e"))
    session = worker.host.node.sessions[worker.session]
    say_parts(worker)
    worker.close()
    session.assembly.add(BlockIds(stream=1, group="full", offset=0, ids=bytes(4)))  # no part is before it
    assert session.assembly.num_bytes == 4


def test_all_that_arrives_of_users_without_a_rank_is_one_request(world):
    """Whoever may connect can make the daemon keep it: the publish is refused anyway."""
    host = world.host("p")
    for number in range(3):
        say_parts(world.attach(host, spec_of(f"e{number}"), uid=2000 + number))
    assert host.node.context.ledger[ARRIVING_ID_BYTES].held <= 16 << 20
    rank = world.register(host, spec_of("e"))
    say_parts(rank)
    assert host.node.sessions[rank.session].assembly.num_bytes == 10 << 20


@pytest.mark.parametrize(
    ("engine_id", "generation"), [("e" * 257, "g"), ("e", "g" * 257), ("", "g"), ("", "")]
)
def test_an_attach_with_a_name_that_is_no_name_is_refused_and_keeps_nothing(world, engine_id, generation):
    worker = world.connect(world.host("p"))
    worker.say(wk.Attach(request=3, engine_id=engine_id, generation=generation))
    assert [(m.request, m.code) for m in worker.received(wk.Refused)] == [(3, Code.RANK_INVALID)]
    assert worker.host.node.sessions[worker.session].attached is None
    worker.say(wk.Attach(request=4, engine_id="e" * 256, generation="g" * 256))
    assert [m.request for m in worker.received(wk.Registered)] == [4]


def test_a_list_as_long_as_may_be_can_be_sent_again():
    assembly, part = BlockIdAssembly(), bytes(1 << 20)
    for _ in range(2):  # the message that completes it was lost the first time
        for number in range(MAX_REQUEST_IDS_BYTES >> 20):
            assembly.add(BlockIds(stream=1, group="full", offset=number << 20, ids=part))
    whole = assembly.complete({"full": PackedBlocks(b"")}, 1)
    assert len(whole["full"].ids) == MAX_REQUEST_IDS_BYTES
