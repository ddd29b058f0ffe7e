"""Which settings a reload changes, which it names, and what it refuses."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from kvxferd.config import Config, LoadedConfig, load_with_sources, merge_reloaded
from kvxferd.control.core_settings import settings_of
from kvxferd.control.node_admin import NodeAdmin
from kvxferd.control.ownership_file import OwnershipFile
from kvxferd.core.allowlist import ALLOW_ALL
from kvxferd.core.node import Node
from kvxferd.daemon import Daemon
from kvxferd.errors import ConfigError
from kvxferd.ids import BootId
from tests.support.other_user import NOBODY, needs_root, open_directory

KEY = "ab" * 32


def config(**settings: str) -> Config:
    return loaded(**settings).config


def loaded(**settings: str) -> LoadedConfig:
    """These settings, as flags."""
    return load_with_sources(None, {}, {name.replace("__", "."): text for name, text in settings.items()})


def test_lists_and_the_level_change_and_the_rest_is_named() -> None:
    running = loaded(worker__allowed_uids="1", http__bind="127.0.0.1:1")
    read = loaded(worker__allowed_uids="2", log__level="debug", http__bind="127.0.0.1:2")
    merged = merge_reloaded(running, read)
    assert merged.changed == ["worker.allowed_uids", "log.level"]
    assert merged.ignored == ["http.bind"]
    after = loaded(worker__allowed_uids="2", log__level="debug", http__bind="127.0.0.1:1")
    assert merged.loaded == after
    assert merge_reloaded(after, after) == (after, [], []), "the same again is nothing"


def test_what_does_not_go_together_with_the_running_key_is_refused_whole() -> None:
    running = loaded(peer__curve_secret_key_file="/k", peer__curve_allowed_keys=KEY)
    with pytest.raises(ConfigError, match="nobody would be let in"):
        merge_reloaded(running, loaded(log__level="debug"))


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    """None is free below the limit. It stays above the two that libzmq polls, or its poll aborts."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@asynccontextmanager
async def parts_of_a_daemon(running: Config, read: Config) -> AsyncIterator[Daemon]:
    """The parts that a reload changes, with their sockets open."""
    daemon = Daemon(LoadedConfig(running), lambda: LoadedConfig(read))
    daemon._peer_socket.start()
    daemon._node = Node(
        boot=BootId("b"),
        endpoint=daemon._advertised_endpoint(),
        settings=settings_of(running, daemon._peer_admission.allowlist),
        new_token=lambda: "token",
    )
    daemon._has_node = True
    daemon._ownership_file = OwnershipFile(Path("unused"), daemon._node.owners.saved_ranks)
    daemon._make_movers(())
    daemon._admin = NodeAdmin(
        daemon._node,
        daemon._recorders.history,
        daemon._on_event,
        daemon.drain,
        daemon.reload,
    )
    daemon._worker_socket.start()
    try:
        yield daemon
    finally:
        daemon._worker_socket.stop()
        await asyncio.sleep(0)
        daemon._peer_socket.stop()


@needs_root
async def test_without_descriptors_a_user_who_is_removed_loses_their_session_all_the_same() -> None:
    with open_directory() as directory:
        path = str(directory / "worker.sock")
        same = {"worker__socket": path, "worker__mode": "0666", "peer__bind": "tcp://127.0.0.1:0"}
        running = config(**same, worker__allowed_uids=f"{NOBODY}")
        read = config(**same, worker__allowed_uids="1", peer__allowed_addresses="127.0.0.2")
        async with parts_of_a_daemon(running, read) as daemon:
            loop = asyncio.get_running_loop()
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as worker:
                os.seteuid(NOBODY)
                try:
                    worker.connect(path)
                finally:
                    os.seteuid(0)
                for _ in range(2):
                    await asyncio.sleep(0)  # its connection waits already: the loop's next turn takes it
                assert daemon._worker_socket._connections
                peer = socket.create_connection(
                    daemon._peer_socket.bound_endpoint.removeprefix("tcp://").split(":")
                )
                peer.setblocking(False)
                assert await asyncio.wait_for(loop.sock_recv(peer, 1), 10)  # libzmq has accepted it
                with no_descriptor_left():
                    reloaded = daemon.reload()
                    again = daemon.reload()
                assert set(reloaded.changed) == {"peer.allowed_addresses", "worker.allowed_uids"}
                assert reloaded.closed_sessions == 1
                assert again.changed == []
                async with asyncio.timeout(10):  # what could not be shut is shut as soon as it can
                    while await loop.sock_recv(peer, 1 << 16):
                        pass
                peer.close()


async def test_what_a_reload_could_not_do_the_next_one_does() -> None:
    with open_directory() as directory:
        running = config(
            worker__socket=str(directory / "w"), worker__allowed_uids="1", peer__bind="tcp://127.0.0.1:0"
        )
        read = config(
            worker__socket=str(directory / "w"), worker__allowed_uids="2", peer__allowed_addresses="127.0.0.2"
        )
        async with parts_of_a_daemon(running, read) as daemon:
            peer_socket = daemon._peer_socket
            del daemon._peer_socket  # what comes on the way raises
            daemon._on_hangup()
            daemon._peer_socket = peer_socket
            assert set(daemon.reload().changed) == {"worker.allowed_uids", "peer.allowed_addresses"}


def test_child_movers_get_their_settings_from_the_core() -> None:
    settings = settings_of(config(mover__read="covering", mover__placement="staged"), ALLOW_ALL)
    assert (settings.read_way, settings.device_placement) == ("covering", "staged")
