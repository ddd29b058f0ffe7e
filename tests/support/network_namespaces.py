"""Two hosts: network namespaces with an address each, joined by a cable."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

SUBNET = "10.213.77"
DEVICE = "wire0"  # in either namespace
NOBODY = "02:00:00:00:00:99"


def _ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


class Host:
    """One namespace."""

    def __init__(self, name: str, address: str) -> None:
        self.namespace = name
        self.address = address

    @property
    def prefix(self) -> tuple[str, ...]:
        """What a command is run with to be on this host."""
        return ("ip", "netns", "exec", self.namespace)

    def ip(self, *words: str) -> str:
        return _ip("-n", self.namespace, *words)

    def link(self, state: str) -> None:
        """Plug the cable in ("up") or out ("down")."""
        self.ip("link", "set", DEVICE, state)

    def lose_what_is_sent_to(self, other: Host) -> None:
        """What leaves for the other host arrives nowhere, and nobody is told."""
        self.ip("neigh", "replace", other.address, "lladdr", NOBODY, "nud", "permanent", "dev", DEVICE)

    def find_again(self, other: Host) -> None:
        self.ip("neigh", "del", other.address, "dev", DEVICE)

    def received_bytes(self) -> int:
        """What has come in over the cable."""
        (link,) = json.loads(self.ip("-j", "-s", "link", "show", "dev", DEVICE))
        return int(link["stats64"]["rx"]["bytes"])


class Cable:
    """Joins both hosts; `cut` removes them, however far the making had come."""

    def __init__(self) -> None:
        self.near = Host(f"kvx-{os.getpid()}-a", f"{SUBNET}.1")
        self.far = Host(f"kvx-{os.getpid()}-b", f"{SUBNET}.2")

    def plug_in(self) -> None:
        """Make the hosts. Raises OSError where this user or kernel cannot, or there is no `ip`."""
        for host in (self.near, self.far):
            _ip("netns", "add", host.namespace)
        ends = (self.near.namespace, "type", "veth", "peer", "name", DEVICE, "netns", self.far.namespace)
        _ip("link", "add", DEVICE, "netns", *ends)
        for host in (self.near, self.far):
            host.ip("addr", "add", f"{host.address}/24", "dev", DEVICE)
            host.ip("link", "set", "lo", "up")
            host.link("up")

    def cut(self) -> None:
        for host in (self.near, self.far):
            with suppress(OSError):
                _ip("netns", "del", host.namespace)


@contextmanager
def plugged_in() -> Iterator[Cable]:
    """Make two hosts, which are gone at the end. Skips the test where they cannot be made."""
    cable = Cable()
    try:
        cable.plug_in()
    except OSError as error:
        cable.cut()
        pytest.skip(f"no network namespaces here: {error}")
    try:
        yield cable
    finally:
        cable.cut()
