"""What is looked at when all is at rest, before idle timers have forgotten: what has ended is not kept.

A daemon is asked over its control socket, as an operator asks it; descriptors and processes are the kernel's.
"""

from __future__ import annotations

import math
import os
import re
import selectors
import socket
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import msgspec

from kvxferd.ids import Rank
from kvxferd.wire.limits import FENCE_WORD_BYTES
from tests.simulation.checks import Check
from tests.simulation.history import HISTORY, wrong_in_history
from tests.simulation.interposed import set_on
from tests.simulation.kernel import Process, TaskState
from tests.simulation.liars import OTHER_VERSION
from tests.simulation.libzmq import SimSocket, SimTracker
from tests.simulation.network import Wire
from tests.simulation.operators import STATUS, Operator, wrong_in_status
from tests.simulation.shapes import block_tokens
from tests.simulation.store import WITH_GPU, MemoryKind

if TYPE_CHECKING:
    from tests.simulation.worker import Worker
    from tests.simulation.world import World

NUM_EVENTFDS = 8  # of a daemon: one a peer and loop
NUM_EVENTFDS_LIAR = 4  # its peer, which is gone
NUM_THREADS = 5
NUM_LATE_MOVERS = 3
NUM_FENCE_PAGES = 2
NUM_PIPES_RESIDENT = 6  # a mover that was replaced is closed when the next is started
# Of each connection a few messages are handled in a turn, and each makes a message to a few ranks: five times
# the most that was seen in 28 episodes (23,348 bytes in 52 messages).
MAX_TURN_BYTES, MAX_TURN_MESSAGES = 128 << 10, 256
MAX_TURN_PARTS = 4096  # where block ids go one or two in a message, or a frame as two
SMALL_FRAMES = "frame_socket MAX_COALESCED_BYTES"
METRICS, TERMS = "/metrics", "/v1/topology"
# Of the node in `/v1/status`: nothing of it is left at rest.
GONE = (
    "num_quarantined", "quarantined_bytes", "transfers", "pulls", "published_bytes", "num_grants_given",
    "num_grants_held", "num_retired_movers",
)  # fmt: skip
USED_AT_REST = frozenset({"max_sessions", "max_ranks", "max_peers"})
_DELIVERED = re.compile(r'kvxferd_pulls_total{code="none",outcome="delivered"} ([0-9.]+)')


class Audit:
    """Compares a world at rest with how it was when nothing had happened yet."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._operator = Operator(world)
        self._begin: dict[str, Counter[str]] = {}  # descriptors and threads by role
        self._num_movers: dict[str, int] = {}
        self._files: set[str] = set()

    def begin(self) -> None:
        """Note what there is, after a start that has settled."""
        self._begin = self._held()
        # One of a session that has ended already, by a low limit, may take long to die.
        movers = {node: self._world.movers_of(node) for node in self._world.node_names}
        self._num_movers = {node: sum(one.may_run for one in running) for node, running in movers.items()}
        self._files = self._list_files()

    def ask(self, path: str) -> None:
        """Ask all daemons; `is_answered` once they have replied."""
        for node in self._world.node_names:
            self._operator.ask(node, path)

    @property
    def is_answered(self) -> bool:
        """Whether all have replied."""
        return not self._operator.num_left

    def left(self) -> list[str]:
        """Return what is left that should not be, but for what daemons say."""
        found = []
        for node in self._world.node_names:
            number = len(self._world.movers_of(node))
            # One that did not get ready in time is started anew for the next request only.
            may_lack = "core.ranks.mover_pool START_TIMEOUT_S" in self._world.traits.small_numbers
            had = self._num_movers[node]
            if number > had or (number < had and not may_lack):
                found.append(f"{node} has {number} movers, and had {had}")
        resident = {
            engine.shape.name for engine in self._world.engines if engine.shape.memory is MemoryKind.RESIDENT
        }
        has_gpu = any(engine.shape.memory in WITH_GPU for engine in self._world.engines)
        for role, held in self._held().items():
            for kind, number in (held - self._begin.get(role, held)).items():
                # Movers that end after the next has started are closed when another starts.
                if kind == "pipe" and number <= NUM_LATE_MOVERS and role.split("/")[0] in resident:
                    continue
                # What a read of its own GPU memory was tried in, where that read has not ended.
                if kind == "memfd" and number == 1 and role == "a mover" and has_gpu:
                    continue
                found.append(f"{role} holds {number} more of {kind}")
        for mover in self._world.fabric.agents.values():
            # A read of its own memory, to try it, may hang; and one of a word by which it connects to another
            # is polled for two seconds, and then when there is something else to poll for.
            words = {read.agent: read for read in mover.held if read.num_bytes == FENCE_WORD_BYTES}
            held = [read.agent for read in mover.held if words.get(read.agent) is not read]
            if others := [agent for agent in held if agent != mover.agent]:
                found.append(f"{mover.process.name} has not ended its reads from {others}")
        if files := self._list_files() - self._files:
            found.append(f"there are more files: {sorted(files)}")
        return found

    def left_in_daemons(self, path: str) -> list[str]:
        """Return what is wrong by the replies of all daemons."""
        look = {
            STATUS: self._left_in_daemon, METRICS: self._miscounted, HISTORY: self._misremembered,
            TERMS: self._misnamed,
        }[path]  # fmt: skip
        return [text for node in self._world.node_names for text in look(node)]

    def _misremembered(self, node: str) -> list[str]:
        """Return what a daemon's history says otherwise than engines."""
        reply, heard = self._operator.replies[node, HISTORY], self._world.heard[node]
        # A later process of an engine may give its transfers the same names.
        once = {engine.shape.name for engine in self._world.engines if engine.life == 1}
        heard.releases = {key: whys for key, whys in heard.releases.items() if key[0] in once}
        is_whole = node not in self._world.unsure_counts
        return [f"{node}: {text}" for text in wrong_in_history(reply, heard, is_whole=is_whole)]

    def _misnamed(self, node: str) -> list[str]:
        """Return what a daemon says otherwise of engines that read one another than their deployments."""
        held = {engine.shape.name: engine.shape.deployment.ranks for engine in self._world.engines}
        reply = msgspec.json.decode(self._operator.replies[node, TERMS])
        found = [] if "topology" in reply else [f"{node} does not say what it knows of engines: {reply}"]
        for terms in reply.get("topology", ()):
            names = reader, source = terms["local_engine_id"], terms["engine_id"]
            if not {*names} <= {*held}:
                continue  # one of them was a stranger
            mine = held[reader][Rank(*terms["local_rank"])]
            theirs = held[source][Rank(terms["remote_pp_rank"], 0)]
            sizes = mine.spec.tp_size, theirs.spec.tp_size
            tokens = block_tokens(mine), block_tokens(theirs)
            num_heads = mine.spec.num_kv_heads or any(group.block_tokens for group in mine.layout.groups)
            is_replicated = 0 < num_heads < sizes[1]
            right = {
                "tp_ratio": _ratio(*sizes) or -(_ratio(*reversed(sizes)) or 0) or None,
                "block_size_ratio": _ratio(*tokens),
                "is_kv_replicated": is_replicated,
                "replicates_kv_cache": is_replicated or (not mine.spec.num_kv_heads and num_heads > 0),
            }
            if wrong := {name: terms[name] for name in right if terms[name] != right[name]}:
                found.append(f"{node} says {wrong} of {names}, and it is {right}")
        return found

    def _left_in_daemon(self, node: str) -> list[str]:
        """Return what a daemon by its own word still has."""
        state = msgspec.json.decode(self._operator.replies[node, STATUS])["node"]
        found = [f"{node} has {name} {state[name]}" for name in GONE if state[name]]
        found += wrong_in_status(state)
        used = {limit["name"]: limit["used"] for limit in state["limits"]}
        found += [
            f"{node} charges {number} of {name}"
            for name, number in used.items()
            if number and name not in USED_AT_REST
        ]
        here = [worker for engine in self._world.engines for worker in engine.workers if worker.node == node]
        if state["num_sessions"] != len(here):
            found.append(f"{node} has {state['num_sessions']} sessions of {len(here)} workers")
        ranks = [worker for worker in here if worker.spec is not None]
        return [*found, *self._wrong_engines(node, state, ranks)]

    def _wrong_engines(self, node: str, state: dict[str, Any], ranks: list[Worker]) -> Iterator[str]:
        """Yield what a daemon shows otherwise of engines: its own ranks, and as a home those of members."""
        homed = [engine for engine in self._world.engines if engine.shape.nodes[0] == node]
        members = [worker for engine in homed for worker in engine.ranks if worker.node != node]
        wanted = {(w.name, "ready" if w in ranks else "remote", w.engine in homed) for w in ranks + members}
        shown = set()
        for engine, rank in ((one, rank) for one in state["engines"] for rank in one["ranks"]):
            name = f"{engine['engine_id']}.{engine['generation'][1:]}/{rank['rank'][0]}.{rank['rank'][1]}"
            if engine["complete"] or rank["state"] != "remote":  # else its node may have been lost
                shown.add((name, rank["state"], engine["complete"]))
        if shown != wanted:
            yield f"{node} shows {sorted(shown)}, and there are {sorted(wanted)}"
        names = {(worker.engine.shape.name, worker.engine.shape.uid, None, 0) for worker in ranks}
        owners = {tuple(one.values()) for one in state["ownerships"]}
        if self._world.forgets_owners and owners != names:
            yield f"{node} shows owners {sorted(owners, key=str)}, and there are {sorted(names)}"

    def _miscounted(self, node: str) -> list[str]:
        """Return what a daemon has counted otherwise than engines."""
        delivered = self._world.heard[node].num_delivered
        counted = _DELIVERED.search(self._operator.replies[node, METRICS].decode())
        number = int(float(counted[1])) if counted is not None else 0
        if node in self._world.unsure_counts or number == delivered:
            return []
        return [f"{node} has counted {number} deliveries, and its engines {delivered}"]

    def _held(self) -> dict[str, Counter[str]]:
        """Return what the living processes hold, by role: of movers, which are alike, the most of any."""
        found: dict[str, Counter[str]] = {}
        workers = {w.process: w for engine in self._world.engines for w in engine.workers}
        for process in self._world.kernel.processes.values():
            if process.is_dead or process.name.startswith("operator"):
                continue
            held = descriptors_of(process)
            role = process.name
            if (worker := workers.get(process)) is not None:
                role = f"{worker.engine.shape.name}{role[role.index('/') :]}"
                held["memfd"] -= sum(grave.num_fds for grave in worker.graves)
                if worker.engine.shape.memory is MemoryKind.RESIDENT:
                    held["pipe"] = max(held["pipe"], NUM_PIPES_RESIDENT)
            elif " mover " in role:
                role = "a mover"
                # Its own, and a scheduler's, which goes from mover to mover.
                held["fence page"] = max(held["fence page"], NUM_FENCE_PAGES)
            # Peers' sockets and the loop's threads come with use, a few in all.
            least = NUM_EVENTFDS + (NUM_EVENTFDS_LIAR if self._world.traits.lies_share else 0)
            held["eventfd"] = max(held["eventfd"], least)
            # libzmq's own is left behind by a start that failed, after which a real process ends.
            threads = [task for task in process.tasks if not task.name.endswith(" libzmq")]
            held["thread"] = max(NUM_THREADS, sum(task.state is not TaskState.DONE for task in threads))
            found[role] = found.get(role, Counter()) | held
        return found

    def _list_files(self) -> set[str]:
        found = {str(path) for path in self._world.directory.rglob("*")}
        return {path for path in found if not path.endswith(".unreadable")}  # a torn file, kept for people


def _ratio(mine: int, theirs: int) -> int | None:
    return mine // theirs if theirs and mine % theirs == 0 else None


def descriptors_of(process: Process) -> Counter[str]:
    """Return how many descriptors of each kind a process has, without those that the kernel here watches."""
    watched = {str(w.fd) for task in process.tasks for fd, w in task.watches.items() if w.fd != fd}
    directory = f"/proc/self/task/{process.thread_id}/fd"
    found: Counter[str] = Counter()
    for name in set(os.listdir(directory)) - watched:
        link = os.readlink(f"{directory}/{name}")
        if link.startswith("/"):
            kind = "memfd" if link.startswith("/memfd:") else "file"
            kind = "fence page" if "kvxferd-fence" in link else kind
        else:
            kind = link.split(":")[1].strip("[]") if link.startswith("anon_inode") else link.split(":")[0]
        found[kind] += 1
    return found


class Turns:
    """What each daemon sends between two waits of its loop, to all together."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._sent: dict[Process, tuple[int, int]] = {}
        self._operators: WeakSet[socket.socket] = WeakSet()  # who have as much as they ask for
        real_sendmsg, real_queue, real_select = (
            socket.socket.sendmsg, SimSocket._queue, selectors.EpollSelector.select
        )  # fmt: skip

        def sendmsg(sock: socket.socket, *arguments: object) -> int:
            sent = real_sendmsg(sock, *arguments)  # type: ignore[arg-type]
            content = b"".join(arguments[0])[:sent]  # type: ignore[call-overload]
            if content.startswith(b"HTTP/"):
                self._operators.add(sock)
            if sock not in self._operators:
                self._count(sent)
                self._world.on_sent(sock.fileno(), content)
            return sent

        def queue(sock: SimSocket, route: bytes | None, payload: bytes, tracker: SimTracker | None) -> None:
            self._count(len(payload))
            real_queue(sock, route, payload, tracker)

        def select(selector: selectors.EpollSelector, timeout: float | None = None) -> object:
            self._end()
            return real_select(selector, timeout)

        set_on(socket.socket, "sendmsg", sendmsg)
        set_on(SimSocket, "_queue", queue)
        set_on(selectors.EpollSelector, "select", select)

    def _count(self, size: int) -> None:
        process = self._world.kernel.current.process
        if process.name in self._world.node_names:
            num_bytes, number = self._sent.get(process, (0, 0))
            self._sent[process] = num_bytes + size, number + 1

    def _end(self) -> None:
        process = self._world.kernel.current.process
        num_bytes, number = self._sent.pop(process, (0, 0))
        traits = self._world.traits
        has_parts = traits.part_bytes or process.io_bytes or SMALL_FRAMES in traits.small_numbers
        most = MAX_TURN_PARTS if has_parts else MAX_TURN_MESSAGES
        if num_bytes > MAX_TURN_BYTES or number > most:
            text = f"{process.name} sends {num_bytes} bytes in {number} messages in one turn of its loop"
            self._world.violate(Check.TURN, text)


class Requests:
    """Looks at what daemons ask: nothing that was given up; and behind a refused hello nothing is handled."""

    def __init__(self, world: World) -> None:
        self._world = world
        # By grant the last request for it; infinite once it is given back.
        self._latest: dict[str, float] = {}
        self._answered: set[tuple[Process, int]] = set()  # requests for grants
        self._hellos: dict[Wire, int] = {}
        self._refused: dict[Wire, int] = {}  # the hello
        self._welcomed: set[Wire] = set()  # a liar may say hello twice: what it asked between is answered
        self._forgets = "core.peers.routes MAX_ROUTES" in world.traits.low_numbers  # what it has refused

    def saw(self, wire: Wire, payload: bytes) -> None:
        """Look at a message between two daemons."""
        message = msgspec.msgpack.decode(payload)
        number = message.get("request", 0)
        if message["t"] in ("GrantReply", "PeerRefused"):
            self._answered.add((wire.dealer.process, number))
        match message["t"]:
            case "GrantRequest":
                latest, process = self._latest.get(message["grant"], number), wire.dealer.process
                is_early = number > latest and (process, latest) not in self._answered
                if number < latest or (is_early and self._world.expectations.is_calm()):
                    what = "is given up" if number < latest else f"comes before the reply to {latest}"
                    self._world.violate(Check.QUIET, f"{process.name} sends request {number}, which {what}")
                self._latest[message["grant"]] = number
            case "ReleaseGrant" | "Acknowledge":
                self._latest[message["grant"]] = math.inf
            case "PeerHello":
                self._hellos[wire] = number
            case "PeerRefused" if self._hellos.get(wire) == number and not self._forgets:
                # Of one that cannot be read either nothing is known: it names a version that was drawn.
                if f"version {OTHER_VERSION}:" in message["message"] and wire not in self._welcomed:
                    self._refused[wire] = number
            case "PeerWelcome":
                self._welcomed.add(wire)
                self._refused.pop(wire, None)
            case "ManifestReply" | "GrantReply" | "GrantsRenewed" as reply:
                if number > self._refused.get(wire, math.inf):
                    text = f"{wire.router.process.name} has refused a hello, and sends {reply} behind it"
                    self._world.violate(Check.REFUSED, text)
