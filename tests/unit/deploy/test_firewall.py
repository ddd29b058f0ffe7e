"""The firewall's rules: they are valid, cover the ports that the daemon opens, and hold between two hosts."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvxferd.config import Config
from kvxferd.config.types import split_endpoint
from tests.support.documented_commands import blocks_of, commands_of
from tests.support.network_namespaces import Cable, Host, plugged_in
from tests.support.repository import ROOT

RULES = ROOT / "deploy" / "firewall" / "kvxferd.nft"
PAGE = ROOT / "docs" / "how-to" / "kubernetes.md"
PROBE_S = 0.5  # of a packet that is dropped; one that arrives is answered within a millisecond

# Prints what becomes of a connection to each port.
CONNECT = """
import socket, sys
target, limit_s, *ports = sys.argv[1:]
for port in ports:
    try:
        socket.create_connection((target, int(port)), timeout=float(limit_s)).close()
        print("open")
    except OSError as error:
        print("dropped" if isinstance(error, TimeoutError) else error)
"""
LISTEN = """
import socket, sys
sockets = [socket.create_server(("0.0.0.0", int(port))) for port in sys.argv[1:]]
print("listening", flush=True)
sys.stdin.read()
"""


def nft(*words: str, prefix: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*prefix, "nft", *words], cwd=ROOT, capture_output=True, text=True, check=False, timeout=30
    )


def require_nft() -> None:
    """Skip where there is no nft, or where this user or kernel cannot check even an empty rule set."""
    if shutil.which("nft") is None:
        pytest.skip("there is no nft")
    done = nft("-c", "-f", "/dev/null")
    listed = nft("list", "tables")
    for tried in (done, listed):
        if tried.returncode:
            pytest.skip(f"nft cannot be used here: {tried.stderr.strip()}")


def test_the_rules_cover_the_ports_that_the_daemon_opens() -> None:
    text = RULES.read_text()
    peer = split_endpoint(Config().peer.bind)[1]
    http = int(Config().http.bind.rpartition(":")[2])
    assert re.search(rf"saddr @nodes tcp dport {peer} accept", text)
    assert re.search(rf"saddr @monitoring tcp dport {http} accept", text)
    assert re.search(rf"^\s*tcp dport {http}-{peer} counter drop", text, re.MULTILINE)
    # As the page sets it for the movers.
    ((setting),) = re.findall(r'UCX_TCP_PORT_RANGE = "([\d-]+)"', "".join(blocks_of(PAGE, "toml")))
    assert re.search(rf"saddr @nodes tcp dport {setting} accept", text)
    assert re.search(rf"^\s*tcp dport {setting} counter drop", text, re.MULTILINE)
    # An accept of one table ends nothing for the others; only what is dropped is decided here.
    assert "policy accept" in text


def test_nft_accepts_the_rules() -> None:
    require_nft()
    (command,) = [c for c in commands_of(PAGE) if c.program == "nft" and "-c" in c.words]
    done = nft(*command.arguments)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.fixture
def cable() -> Iterator[Cable]:
    require_nft()
    with plugged_in() as cable:
        yield cable


def connect(source: Host, target: str, ports: tuple[int, ...]) -> list[str]:
    done = subprocess.run(
        [*source.prefix, sys.executable, "-S", "-c", CONNECT, target, str(PROBE_S), *map(str, ports)],
        capture_output=True, text=True, check=True, timeout=30,
    )  # fmt: skip
    return done.stdout.splitlines()


@pytest.mark.netns
def test_the_rules_admit_nodes_and_nobody_else(cable: Cable, tmp_path: Path) -> None:
    node, peer = cable.near, cable.far
    ports = (9440, 9441, 20000, 8000)
    with ExitStack() as stack:
        server = stack.enter_context(
            subprocess.Popen(
                [*node.prefix, sys.executable, "-S", "-c", LISTEN, *map(str, ports)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        stack.callback(server.stdin.close if server.stdin else server.kill)
        assert server.stdout is not None
        assert server.stdout.readline() == "listening\n"

        def seen(source: Host, nodes: str, monitoring: str) -> list[str]:
            own = tmp_path / "own.nft"
            text = RULES.read_text().replace("10.0.0.0/16", nodes).replace("10.244.0.0/16", monitoring)
            own.write_text(text)
            done = nft("-f", str(own), prefix=node.prefix)
            if done.returncode:
                pytest.skip(f"nft cannot load rules in a namespace here: {done.stderr.strip()}")
            return connect(source, node.address, ports)

        everything = f"{peer.address}/32"
        nothing = "192.0.2.0/24"
        # HTTP, peers, movers, and a port that is none of ours.
        assert seen(peer, everything, nothing) == ["dropped", "open", "open", "open"]
        assert seen(peer, nothing, everything) == ["open", "dropped", "dropped", "open"]
        assert seen(peer, nothing, nothing) == ["dropped", "dropped", "dropped", "open"]
        # The kubelet's probes, from the node to its own address.
        assert seen(node, nothing, nothing) == ["open"] * 4
