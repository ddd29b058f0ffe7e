"""Operators: processes that send requests to the control sockets of daemons."""

from __future__ import annotations

import json
import os
import socket
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from kvxferd.core.sink import manifests
from tests.simulation.checks import Check

if TYPE_CHECKING:
    from tests.simulation.transfers import Pull, Transfer
    from tests.simulation.world import World

REPLY_S = 5.0
STATUS = "/v1/status"
LONG_WAIT_S = 1.0  # of a pull, for which it is said then for whom it waits
# The last three are of what has ended while it was listed.
NOT_WAITING = ("posted", "stopping", "in-doubt", "delivered", "failed", "quiesced")
_POLLIN = 1


class Operator:
    """A process that sends requests to control sockets."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.replies: dict[tuple[str, str], bytes] = {}  # by node and path
        self.num_left = 0

    def ask(self, node: str, path: str) -> None:
        """Start a process that gets a path from a node's daemon."""
        self.num_left += 1
        self._spawn(node, lambda: self._run(node, "GET", path))

    def post(self, node: str, path: str, then: Callable[[], None] = lambda: None) -> None:
        """Start a process that tells a node's daemon something; `then` is called once that is done.

        It is not done where the daemon has not heard yet of what it is to end.
        """

        def run() -> None:
            with suppress(OSError):
                if self._run(node, "POST", path):
                    then()

        self._spawn(node, run)

    def cancel_a_pull(self, node: str, seed: int, cancelled: Callable[[Pull], None]) -> None:
        """Start a process that looks at the pulls of a node, and cancels one."""

        def run() -> None:
            with suppress(OSError):
                if pulls := self._look(node)["pulls"]:
                    shown = pulls[seed % len(pulls)]
                    for pull in self._world.open_pulls:
                        if _is_shown_as(pull, shown):
                            cancelled(pull)
                    self._run(node, "POST", f"/v1/pulls/cancel?pull={shown['pull']}")

        self._spawn(node, run)

    def look(self, node: str) -> None:
        """Start a process that looks whether a daemon's state adds up."""
        self._spawn(node, lambda: self._look(node))

    def _look(self, node: str) -> Any:
        self.num_left += 1
        self._run(node, "GET", STATUS)
        if wrong := wrong_in_status(state := json.loads(self.replies[node, STATUS])["node"]):
            self._world.violate(Check.RECORDED, f"{node}: {wrong}")
        return state

    def _spawn(self, node: str, run: Callable[[], None]) -> None:
        self._world.kernel.spawn(f"operator of {node}", run, uid=os.geteuid())

    def _run(self, node: str, method: str, path: str) -> bool:
        """Send a request; return whether it was done."""
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(self._world.directory / node / "control.sock"))
            sock.setblocking(False)
            sock.send(f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            head, self.replies[node, path] = self._receive(sock)
        self.num_left -= method == "GET"
        return head.startswith(b"http/1.1 2")

    def _receive(self, sock: socket.socket) -> tuple[bytes, bytes]:
        """Return a reply's head, in small letters, and its body."""
        got = b""
        while True:
            head, end, body = got.partition(b"\r\n\r\n")
            if end:
                head = head.lower()
                (size,) = [line for line in head.split(b"\r\n") if line.startswith(b"content-length:")]
                if len(body) >= int(size.split(b":")[1]):
                    return head, body
            if not self._world.kernel.wait(((sock.fileno(), _POLLIN),), REPLY_S):
                raise TimeoutError("a daemon does not reply to its operator")
            if not (more := sock.recv(1 << 20)):
                raise ConnectionResetError("a daemon does not reply to its operator")
            got += more


def cancel_transfer(world: World, transfer: Transfer) -> None:
    """Have an operator cancel what an engine has published by an id."""
    publisher = transfer.publisher
    name, home = publisher.engine.shape.name, publisher.engine.shape.nodes[0]
    for former in publisher.engine.all_named(transfer.transfer_id):
        former.is_withdrawn = former.is_cancelled = True
    path = f"/v1/transfers/cancel?transfer_id={transfer.transfer_id}&engine_id={name}"
    Operator(world).post(home, path, lambda: publisher.expect_withdrawn(transfer))


def wrong_in_status(node: dict[str, Any]) -> list[str]:
    """Return what of a daemon's state is otherwise than by what it lists."""
    transfers, pulls, peers, here = node["transfers"], node["pulls"], node["peers"], node["endpoint"]
    states, phases = Counter(row["state"] for row in transfers), Counter(row["phase"] for row in pulls)
    num_grants, num_doubts = sum(row["num_grants"] for row in transfers), phases["in-doubt"]
    oldest_s = max((row["age_s"] for row in transfers), default=0.0)
    learnt = [one["engines"] for one in peers]
    limits = [one for one in node["limits"] if one["name"] != "max_inflight_bytes"]  # one pull may pass that
    unread = [row for row in transfers if row["state"] != "granted"]
    of_readable = {_generation_of(row) for row in transfers if row["state"] == "readable"}
    read_from = [one["ranks"] for one in node["engines"] if _generation_of(one) in of_readable]
    has_memory = any(rank["state"] != "remote" for ranks in read_from for rank in ranks)
    adds_up = {
        "states": (node["transfer_states"], node["pull_phases"]) == (states, phases),
        "grants": node["num_grants_given"] == num_grants,
        # Of a pull that has only its word to read no block is in quarantine.
        "doubts": node["num_quarantined"] == num_doubts and (num_doubts > 0 or not node["quarantined_bytes"]),
        "published": bool(node["published_bytes"]) or not has_memory,
        "oldest": abs(node["oldest_published_s"] - oldest_s) < 0.1,
        # All tokens may be written before all blocks are listed: those of a window come last.
        "ready": all(row["ready_tokens"] == row["num_tokens"] or row["state"] == "writing" for row in unread),
        "waits": all(
            bool(row["waits"]) == (row["phase"] not in NOT_WAITING and row["age_s"] >= LONG_WAIT_S)
            for row in pulls
        ),
        "limits": all(one["used"] <= one["limit"] for one in limits),
        "peers": all(
            len({one["engine_id"] for one in engines}) == len(engines) <= manifests.MAX_ENGINES_PER_PEER
            for engines in learnt
        ),
        "complete": all(
            one["complete"] == (one["home"] == here and not one["lacking"]) for one in node["engines"]
        ),
    }
    return [f"{name} of {node}" for name, is_so in adds_up.items() if not is_so]


def _generation_of(row: dict[str, Any]) -> tuple[str, str]:
    return row["engine_id"], row["generation"]


def _is_shown_as(pull: Pull, shown: dict[str, Any]) -> bool:
    """Whether a row of `/v1/transfers` is that pull, or one like it."""
    assert pull.worker.spec is not None
    names = (
        pull.transfer.transfer_id,
        pull.transfer.publisher.engine.shape.name,
        pull.worker.engine.shape.name,
    )
    rank = (pull.worker.spec.pp_rank, pull.worker.spec.tp_rank)
    return (shown["transfer_id"], shown["source"], shown["sink"], tuple(shown["rank"])) == (*names, rank)
