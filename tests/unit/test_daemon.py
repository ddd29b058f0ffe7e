"""What the daemon's parts see of the node."""

import asyncio
from pathlib import Path

from kvxferd.config import Config, LoadedConfig
from kvxferd.control.ownership_file import OwnershipFile
from kvxferd.core import events as ev
from kvxferd.core.node import Node
from kvxferd.daemon import Daemon
from kvxferd.ids import BootId, Endpoint


async def test_what_a_peer_sends_is_checked_at_the_present_time() -> None:
    """Though nothing has happened for long: a member that joins after another's silence would be refused."""
    daemon = Daemon(LoadedConfig(Config()))
    daemon._node = Node(boot=BootId("b"), endpoint=Endpoint("tcp://127.0.0.1:1"), new_token=lambda: "token")
    daemon._ownership_file = OwnershipFile(Path("unused"), daemon._node.owners.saved_ranks)
    daemon._make_movers(())
    daemon._on_event(ev.Tick())
    before = daemon._node.context.now
    await asyncio.sleep(0.02)
    checks = daemon._peer_socket._inbox._checks()
    assert checks is daemon._node
    assert daemon._node.context.now >= before + 0.015
