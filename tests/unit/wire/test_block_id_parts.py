"""Block ids that travel in parts: their order is kept, and a part that was lost is noticed."""

from __future__ import annotations

import pytest

from kvxferd.errors import BusyError, ProtocolError
from kvxferd.ids import GroupName
from kvxferd.layout import PackedBlocks
from kvxferd.wire.block_id_parts import BlockIdAssembly
from kvxferd.wire.common import BlockIds

GROUP = GroupName("full")
REST = {GROUP: PackedBlocks(ids=b"-end")}


def part(offset: int, ids: bytes) -> BlockIds:
    return BlockIds(stream=2, group=GROUP, offset=offset, ids=ids)


def test_parts_come_before_what_the_request_itself_holds() -> None:
    assembly = BlockIdAssembly()
    assembly.add(part(0, b"one-"))
    assembly.add(part(4, b"two-"))
    assert assembly.complete(REST, 2)[GROUP].ids == b"one-two--end"


def test_of_a_peers_request_a_lost_part_is_noticed_though_another_comes_twice() -> None:
    """The request then holds as many ids as it should."""
    assembly = BlockIdAssembly(may_lose_parts=True)
    assembly.add(part(0, b"one-"))
    assembly.add(part(8, b"six-"))  # the part before it is lost
    assembly.add(part(8, b"six-"))
    with pytest.raises(BusyError, match="a part of them was dropped"):
        assembly.complete(REST, 2)


def test_a_part_that_comes_twice_behind_another_is_refused() -> None:
    assembly = BlockIdAssembly()
    assembly.add(part(0, b"one-"))
    assembly.add(part(4, b"two-"))
    with pytest.raises(ProtocolError, match="8 bytes came before"):
        assembly.add(part(4, b"two-"))


def test_of_parts_that_a_peer_sends_again_the_first_may_be_lost() -> None:
    """The request is refused, and the connection goes on."""
    assembly = BlockIdAssembly(may_lose_parts=True)
    assembly.add(part(0, b"one-"))
    assembly.add(part(4, b"two-"))
    assembly.add(part(4, b"two-"))
    with pytest.raises(BusyError, match="a part of them was dropped"):
        assembly.complete(REST, 2)
    assert assembly.num_bytes == 0


def test_a_peers_request_whose_parts_were_all_lost_is_refused() -> None:
    assembly = BlockIdAssembly(may_lose_parts=True)
    with pytest.raises(BusyError, match="a part of them was dropped"):
        assembly.complete(REST, 2)
    assert assembly.complete(REST, 0) == REST
