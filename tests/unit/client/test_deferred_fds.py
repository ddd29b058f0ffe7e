"""A registration announces its descriptors, and most of them come when they are wanted."""

from __future__ import annotations

import os

import msgspec

from kvxferd.client import connect
from kvxferd.errors import Code
from kvxferd.ids import RegionId
from kvxferd.layout import RegionSpec
from kvxferd.memory import SealedMemory
from kvxferd.wire import worker
from kvxferd.wire.common import FdBatch
from kvxferd.wire.limits import MAX_FDS_PER_FRAME
from tests.support.client_harness import LAYOUT, REGION, SPEC, Stage
from tests.support.scripted_daemon import WAIT_S

NUM = 300


def test_the_rest_comes_when_it_is_wanted(stage: Stage) -> None:
    memories = [stage.memory]
    for _ in range(NUM - 1):
        memories.append(SealedMemory.create(4096))
        stage.stack.callback(memories[-1].close)
    names = [REGION, *(RegionId(f"more{n}") for n in range(NUM - 1))]
    specs = [RegionSpec(n, m.size_bytes) for n, m in zip(names, memories, strict=True)]
    layout = msgspec.structs.replace(LAYOUT, regions=tuple(specs))
    connecting = stage.calling(connect, stage.daemon.path, timeout_s=WAIT_S)
    side = stage.side = stage.daemon.accept()
    side.greet()
    client = connecting.result(WAIT_S)
    stage.stack.callback(client.close)
    registering = stage.calling(
        client.register, SPEC, layout, dict(zip(names, memories, strict=True)), WAIT_S
    )
    register, first = side.receive()
    assert isinstance(register, worker.Register)
    assert (register.num_descriptors, len(first)) == (NUM, MAX_FDS_PER_FRAME)
    assert side.is_silent()
    side.say(worker.FdsWanted(request=register.request))
    part, rest = side.receive()
    assert part == FdBatch(first=MAX_FDS_PER_FRAME - 1)
    inodes = [os.fstat(fd).st_ino for fd in (*first[:-1], *rest)]
    assert inodes == [os.fstat(memory.fd).st_ino for memory in memories]
    side.say(worker.Refused(request=register.request, code=Code.BUSY, message="no", retry_after_s=1.0))
    assert registering.exception(WAIT_S) is not None


def test_a_few_come_with_it(stage: Stage) -> None:
    connecting = stage.calling(connect, stage.daemon.path, timeout_s=WAIT_S)
    side = stage.side = stage.daemon.accept()
    side.greet()
    client = connecting.result(WAIT_S)
    stage.stack.callback(client.close)
    registering = stage.calling(client.register, SPEC, LAYOUT, {REGION: stage.memory}, WAIT_S)
    register, fds = side.receive()
    assert isinstance(register, worker.Register)
    assert (register.num_descriptors, len(fds)) == (0, 2)
    side.say(worker.Refused(request=register.request, code=Code.BUSY, message="no", retry_after_s=1.0))
    assert registering.exception(WAIT_S) is not None
