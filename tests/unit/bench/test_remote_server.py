"""The other side of a bench: whom it lets in, where it can be reached, and that silence ends."""

import asyncio
import re
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from kvxferd.bench import remote_client, remote_protocol, remote_server
from kvxferd.bench.hosts import LocalHost
from kvxferd.errors import Code, KvxferdError

DEADLINE_S = 20.0


def while_serving(bind: str, act: Callable[[str, str], Awaitable[None]]) -> None:
    """Serve, and act on the address and the token that it says."""

    async def both() -> None:
        said: asyncio.Queue[str] = asyncio.Queue()
        server = asyncio.ensure_future(remote_server._serve_until_stopped(bind, said.put_nowait))
        try:
            found = re.search(r"--peer (\S+):(\d+)#(\S+)", await said.get())
            assert found is not None
            assert found[1] == (socket.gethostname() if bind.startswith("0.0.0.0") else "127.0.0.1")
            await act(f"127.0.0.1:{found[2]}", found[3])
        finally:
            server.cancel()
            await asyncio.gather(server, return_exceptions=True)

    asyncio.run(asyncio.wait_for(both(), DEADLINE_S))


@pytest.mark.parametrize("token", ["", "0" * 16, "schlüssel", "\N{SNOWMAN}" * 16])
def test_a_token_that_is_not_the_one_is_refused_whatever_it_is_made_of(token: str) -> None:
    async def act(address: str, right: str) -> None:
        with pytest.raises(KvxferdError, match="the token is wrong") as refused:
            await remote_client.RemoteHost.connect(address, token)
        assert refused.value.code is Code.NOT_ALLOWED
        await (await remote_client.RemoteHost.connect(address, right)).stop()

    while_serving("127.0.0.1:0", act)


def test_bound_to_any_address_it_is_reached_where_it_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts: list[str] = []

    class Noted(LocalHost):
        def __init__(self, directory: Path, peer_host: str) -> None:
            hosts.append(peer_host)
            super().__init__(directory, peer_host)

    monkeypatch.setattr(remote_server, "LocalHost", Noted)

    async def act(address: str, right: str) -> None:
        remote = await remote_client.RemoteHost.connect(address, right)
        # It answers to what nothing there is called: so it has begun to serve.
        with pytest.raises(KvxferdError, match="nothing here is called 7"):
            await remote.request(remote_protocol.SetPaused(who=7, on=True))
        await remote.stop()

    while_serving("0.0.0.0:0", act)
    assert hosts == ["127.0.0.1"]  # where its daemons are to listen


def test_what_is_no_command_is_refused_and_not_left_without_a_reply() -> None:
    async def act(address: str, right: str) -> None:
        remote = await remote_client.RemoteHost.connect(address, right)
        with pytest.raises(KvxferdError, match="cannot serve the bench: ValidationError") as refused:
            await remote.request(remote_protocol.RunCommand(who=7, command=msgspec.Raw(b"{}")))
        assert refused.value.code is Code.INTERNAL
        await remote.stop()

    while_serving("127.0.0.1:0", act)
