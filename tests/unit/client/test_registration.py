"""Reaching a daemon, registering, refusals, timeouts."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import msgspec
import pytest

from kvxferd.client import Client, connect
from kvxferd.errors import Code, EngineError, KvxferdError, LayoutError
from kvxferd.ids import RegionId
from kvxferd.layout import RegionSpec
from kvxferd.memory import SealedMemory
from kvxferd.wire import worker
from kvxferd.wire.common import FdBatch
from kvxferd.wire.limits import MAX_FDS_PER_FRAME
from tests.support.client_harness import LAYOUT, REGION, SPEC, Stage
from tests.support.scripted_daemon import ENDPOINT, WAIT_S


def test_a_refused_register_says_why_and_the_connection_lives_for_one_rank(stage: Stage) -> None:
    client = stage.client()
    registering = stage.registering(client)
    register = stage.side.expect(worker.Register)
    why = "cannot register pp0.tp0: another worker is that rank"
    stage.side.say(worker.Refused(request=register.request, code=Code.RANK_TAKEN, message=why))
    with pytest.raises(EngineError, match="another worker") as refused:
        registering.result(WAIT_S)
    assert refused.value.code is Code.RANK_TAKEN
    again = stage.registering(client)
    stage.side.register(stage.new_mover())
    assert again.result(WAIT_S).is_connected
    with pytest.raises(EngineError, match="connect once for each"):
        client.attach("prefill-0", "g7")


@pytest.mark.parametrize(
    "reply",
    [
        lambda number: worker.Refused(request=number, code=Code.BUSY, message="no"),
        lambda number: worker.Registered(request=number, endpoint=ENDPOINT),
        lambda number: worker.FdsRequest(request=number),
    ],
    ids=["refused", "registered", "asked for descriptors"],
)
def test_a_reply_to_another_register_ends_the_connection_and_no_call(
    stage: Stage, reply: Callable[[int], worker.DaemonMessage]
) -> None:
    client = stage.client()
    registering = stage.registering(client)
    former = stage.side
    message = reply(former.expect(worker.Register).request + 1)
    former.say(message, *[former.page.fd] * isinstance(message, worker.Registered))
    stage.accept()
    stage.side.register(stage.new_mover())
    assert registering.result(WAIT_S).is_connected
    with pytest.raises(ConnectionError):
        former.receive()


def test_what_cannot_be_registered_is_named_before_anything_is_sent(stage: Stage) -> None:
    client = stage.client()
    layout = msgspec.structs.replace(LAYOUT, end_layer=1.5)
    with pytest.raises(LayoutError, match="end_layer"):
        client.register(SPEC, layout, {REGION: stage.memory})
    with pytest.raises(EngineError, match="no memory given"):
        client.register(SPEC, LAYOUT, {})
    assert stage.side.is_silent()


@pytest.mark.parametrize(
    ("socket", "timeout_s", "words", "code"),
    [
        ("other.sock", 0.2, "start `kvxferd serve`", Code.DAEMON_LOST),
        ("x" * 200, 2 * WAIT_S, "cannot reach kvxferd at .*: AF_UNIX path too long", Code.DAEMON_LOST),
        ("worker.sock", 0.2, "does not greet", Code.DEADLINE),
    ],
    ids=["nobody", "no path, at once", "silent"],
)
def test_no_daemon_says_what_to_do(
    stage: Stage, socket: str, timeout_s: float, words: str, code: Code
) -> None:
    connecting = stage.calling(connect, stage.daemon.path.parent / socket, timeout_s=timeout_s)
    with pytest.raises(KvxferdError, match=words) as failed:
        connecting.result(WAIT_S)
    assert failed.value.code is code


def test_connect_waits_for_a_daemon_that_starts_and_names_the_client_and_its_versions(stage: Stage) -> None:
    stage.daemon.stop()
    connecting = stage.calling(connect, stage.daemon.path, timeout_s=WAIT_S, name="vllm 0.33")
    stage.daemon.start()
    hello = stage.daemon.accept().greet()
    assert hello.versions == worker.WORKER_VERSIONS
    assert hello.client.startswith("vllm 0.33 (kvxferd ")
    with connecting.result(WAIT_S) as client:
        assert isinstance(client, Client)


def test_a_silent_registration_times_out_and_registers_nothing_late(stage: Stage) -> None:
    client = stage.client()
    registering = stage.registering(client, timeout_s=0.2)
    stage.side.expect(worker.Register)
    with pytest.raises(KvxferdError, match=r"rank pp0\.tp0 of decode-0@g1 within 0\.2 s") as failed:
        registering.result(WAIT_S)
    assert failed.value.code is Code.DEADLINE
    with pytest.raises(ConnectionError):
        stage.side.receive()
    stage.accept()
    again = stage.registering(client)
    stage.side.register(stage.new_mover())
    assert again.result(WAIT_S).is_connected


def test_close_is_idempotent_and_ends_the_thread(stage: Stage) -> None:
    rank, called = stage.rank(), list[str]()
    rank.call_at_close(lambda: called.append("closed"))
    assert not called
    rank.close()
    rank.close()
    assert called == ["closed"]
    with pytest.raises(ConnectionError):
        stage.side.receive()
    assert not [t for t in threading.enumerate() if t.name.startswith("kvxferd-client")]
    with pytest.raises(KvxferdError, match="closed"):
        rank.suspend()


@pytest.mark.parametrize("is_chosen", [True, False])
def test_a_daemon_that_shares_no_version_is_not_asked_again(stage: Stage, is_chosen: bool) -> None:
    """It refuses the client, or chooses a version that the client did not offer."""
    connecting = stage.calling(connect, stage.daemon.path)
    side = stage.daemon.accept()
    theirs = side.expect(worker.Hello).versions.newest + 1
    if is_chosen:
        side.say(worker.Welcome(version=theirs, boot_id="b", lease_s=30.0, max_hold_s=600.0))
    else:
        side.say(worker.Farewell(code=Code.BAD_VERSION, message=f"this one speaks {theirs}"))
    with pytest.raises(KvxferdError, match=str(theirs)) as failed:
        connecting.result(WAIT_S)
    assert failed.value.code is Code.BAD_VERSION
    assert stage.daemon.nobody_comes(0.3)


def test_of_many_descriptors_the_rest_comes_when_it_is_wanted(stage: Stage) -> None:
    num, memories = 300, [stage.memory]
    for _ in range(num - 1):
        memories.append(SealedMemory.create(4096))
        stage.stack.callback(memories[-1].close)
    names = [REGION, *(RegionId(f"more{n}") for n in range(num - 1))]
    specs = [RegionSpec(n, m.size_bytes) for n, m in zip(names, memories, strict=True)]
    layout = msgspec.structs.replace(LAYOUT, regions=tuple(specs))
    client, side = stage.client(), stage.side
    regions = dict(zip(names, memories, strict=True))
    registering = stage.calling(client.register, SPEC, layout, regions, WAIT_S)
    register, first = side.receive()
    assert isinstance(register, worker.Register)
    assert (register.num_descriptors, len(first)) == (num, MAX_FDS_PER_FRAME)
    assert side.is_silent()
    side.say(worker.FdsRequest(request=register.request))
    part, rest = side.receive()
    assert part == FdBatch(first=MAX_FDS_PER_FRAME - 1)
    inodes = [os.fstat(fd).st_ino for fd in (*first[:-1], *rest)]
    assert inodes == [os.fstat(memory.fd).st_ino for memory in memories]
    side.say(worker.Refused(request=register.request, code=Code.BUSY, message="no", retry_after_s=1.0))
    assert registering.exception(WAIT_S) is not None
