"""A publish lists the groups of every stage, and stages may hold different ones."""

from __future__ import annotations

import msgspec

from kvxferd.errors import Code
from kvxferd.layout import PackedBlocks, pack_ids
from kvxferd.layout.presets import attention_layout
from kvxferd.wire import worker as wk
from tests.support.simulation import IDS, TOKENS, Host, Worker, World, spec_of


def stages_of_groups(world: World, host: Host, only: int | None = None) -> list[Worker]:
    """Two stages whose groups have different names, or one of them."""
    spec = spec_of("prefill", pp=2, publish_implies_ready=True)
    workers = []
    for pp_rank, group in enumerate(["full", "window"]):
        if only not in (None, pp_rank):
            continue
        own = msgspec.structs.replace(spec, pp_rank=pp_rank)
        worker = world.connect(host)
        plain = attention_layout(
            spec=own, layout="HND", num_kv_heads=2, head_dim=2, block_tokens=4, num_blocks=32
        )
        groups = tuple(msgspec.structs.replace(g, name=group) for g in plain.groups)
        tensors = tuple(msgspec.structs.replace(t, group=group) for t in plain.tensors)
        worker.spec, worker.layout = own, msgspec.structs.replace(plain, groups=groups, tensors=tensors)
        worker.memory = bytearray(worker.layout.regions[0].size_bytes)
        world.register_again(worker)
        workers.append(worker)
    return workers


def publish_groups(worker: Worker, transfer_id: str, *groups: str) -> None:
    blocks = {group: PackedBlocks(pack_ids(IDS)) for group in groups}
    slot = next(worker.slots)
    worker.say(
        wk.Publish(
            transfer_id=transfer_id,
            nonce="ab" * 16,
            blocks=blocks,
            num_tokens=TOKENS,
            fence_slot=slot,
            incarnations=worker.known,
        ),
        b"w" * 16,
    )


def test_a_publish_lists_the_groups_of_all_stages(world: World) -> None:
    host = world.host("p")
    stages = stages_of_groups(world, host)
    for worker in (*stages, world.attach(host, stages[0].spec)):
        name = f"t{worker.session}"
        publish_groups(worker, name, "full", "window")
        assert worker.over() == []
        publish_groups(worker, f"{name}-other", "full", "window", "other")
        publish_groups(worker, f"{name}-less", "full")
        first, second = worker.heard(wk.PublishRefused)
        assert (first.code, second.code) == (Code.BLOCKS_INVALID, Code.BLOCKS_INVALID)
        assert "group 'other': the engine's groups are 'full', 'window'" in first.message
        assert "without blocks of group 'window'" in second.message


def test_a_group_of_a_stage_that_is_not_back_is_waited_for(world: World) -> None:
    host = world.host("p")
    stages = stages_of_groups(world, host)
    scheduler = world.attach(host, stages[0].spec)
    known = scheduler.known
    host = world.host("p")
    stages_of_groups(world, host, only=0)
    scheduler = world.attach(host, stages[0].spec)
    blocks = {group: PackedBlocks(pack_ids(IDS)) for group in ("full", "window")}
    publish = wk.Publish(
        transfer_id="t", nonce="ab" * 16, blocks=blocks, num_tokens=TOKENS, fence_slot=0, incarnations=known
    )
    scheduler.say(publish, b"w" * 16)
    assert scheduler.over() == [("t", Code.ENGINE_INCOMPLETE)]  # its client asks again
    stages_of_groups(world, host, only=1)
    scheduler.say(publish, b"w" * 16)
    assert len(scheduler.over()) == 1
