"""One rank of an engine that uses kvxferd as an engine would: source or sink of the bench.

`python -m kvxferd.bench.rank_process` handles commands from standard input until it is closed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from typing import Any

from kvxferd import client
from kvxferd.bench import content, protocol
from kvxferd.bench.cases import Case, block_lists, readers_of, reads_of, stamp_of
from kvxferd.bench.shapes import Role
from kvxferd.errors import KvxferdError
from kvxferd.ids import RegionId
from kvxferd.layout import GroupKind
from kvxferd.memory import SealedMemory
from kvxferd.plan import Runs
from kvxferd.tooling.command_loop import serve_commands
from kvxferd.tooling.event_waiter import EventWaiter

CONNECT_TIMEOUT_S = 30.0
REGISTER_TIMEOUT_S = 60.0
PULL_DEADLINE_S = 60.0
RELEASE_TIMEOUT_S = 60.0

Blocks = Mapping[str, client.BlockList]


class BenchRank:
    """A registered rank, its memory, and the events of its daemon."""

    def __init__(self, begin: protocol.StartRank) -> None:
        self._deployment = begin.deployment
        self._rank_id = begin.rank
        self._spec, self._layout = begin.deployment.engine(begin.role)[begin.rank]
        (region,) = self._layout.regions
        self._memory = SealedMemory.create(region.size_bytes, "kvxferd-bench")
        self._words = content.words_of(memoryview(self._memory.buffer))
        if begin.role == "source":
            content.fill(self._words)
        else:
            self._words[:] = 0  # so that every page is mapped before anything is timed
        began = time.perf_counter()
        self._client = client.connect(begin.worker_socket, timeout_s=CONNECT_TIMEOUT_S)
        self._rank = self._client.register(
            engine=self._spec,
            layout=self._layout,
            regions={RegionId(region.region): self._memory},
            timeout_s=REGISTER_TIMEOUT_S,
        )
        self.started_reply = protocol.RankStarted(
            memory=protocol.ProcessMemory(os.getpid(), self._memory.fd),
            register_s=time.perf_counter() - began,
        )
        self._released: set[str] = set()
        self._stamped: Case | None = None
        self._events = EventWaiter(self._rank)

    def close(self) -> None:
        """Unregister; the daemon unmaps the memory."""
        self._client.close()

    # --- as a source

    def publish(self, command: protocol.PublishCommand) -> protocol.Published:
        """Publish all transfers; their content is already written."""
        case = command.case
        lists = [self._blocks(case, "source", slot) for slot in range(min(case.slots, len(command.names)))]
        num_tokens = case.num_tokens
        refs = [
            self._rank.publish(name, blocks=lists[n % case.slots], num_tokens=num_tokens)
            for n, name in enumerate(command.names)
        ]
        return protocol.Published(refs=[ref.to_dict() for ref in refs])

    def open(self, command: protocol.OpenCommand) -> protocol.Published:
        """Publish a transfer before anything of it is written."""
        none = {name: client.BlockList(ids=[]) for name in block_lists(command.case, "source", 0)}
        ref = self._rank.publish(command.name, none, command.case.num_tokens, ready_tokens=0)
        return protocol.Published(refs=[ref.to_dict()])

    def extend(self, command: protocol.ExtendCommand) -> protocol.Extended:
        """Report one chunk after the other, at the given rate."""
        case, num_chunks = command.case, command.num_chunks
        lists = block_lists(case, "source", 0)
        size, tokens = case.blocks // num_chunks, case.num_tokens // num_chunks
        chunks = [
            {name: client.BlockList(ids=ids[n * size : (n + 1) * size].data) for name, ids in lists.items()}
            for n in range(num_chunks)
        ]
        began = last_at = time.perf_counter()
        for number, blocks in enumerate(chunks, 1):
            _wait_until(began + number * command.gap_s)
            last_at = time.perf_counter()
            self._rank.ready(command.name, None if number == num_chunks else number * tokens, blocks)
        return protocol.Extended(last_at=last_at)

    def await_release(self, command: protocol.AwaitRelease) -> protocol.CommandDone:
        """Wait for the daemon to release the blocks."""
        deadline = time.perf_counter() + RELEASE_TIMEOUT_S
        left = set(command.names) - self._released
        while left:
            match self._events.next_event(deadline):
                case client.Released(transfer_id):
                    self._released.add(transfer_id)
                    left.discard(transfer_id)
                case client.PublishRefused(_, code, message):
                    raise KvxferdError(message, code)
        self._released -= set(command.names)
        return protocol.CommandDone()

    # --- as a sink

    def prepare(self, command: protocol.PrepareCommand) -> protocol.CommandDone:
        """Prepare the pulls of these references."""
        for ref in command.refs:
            self._rank.prepare(ref)
        return protocol.CommandDone()

    def abandon(self, command: protocol.AbandonCommand) -> protocol.CommandDone:
        """Abandon references that were prepared and not pulled."""
        for ref in command.refs:
            self._rank.abandon(ref)
        return protocol.CommandDone()

    def pull(self, command: protocol.PullCommand) -> protocol.Moved:
        """Pull all, keeping `window` of them in flight."""
        lists = [self._blocks(command.case, "sink", slot) for slot in range(command.case.slots)]
        waiting = enumerate(command.refs)
        running: dict[client.PullTicket, tuple[int, float, float]] = {}
        samples: dict[int, protocol.Sample] = {}
        while len(samples) < len(command.refs):
            while len(running) < command.window and (following := next(waiting, None)):
                number, ref = following
                blocks = lists[number % len(lists)]
                started = self._start_pull(ref, blocks, command.case, command.progressive)
                running[started[0]] = (number, *started[1:])
            event = self._events.next_event(time.perf_counter() + 2 * PULL_DEADLINE_S)
            ended = time.perf_counter()
            delivered = _delivered_or_raise(event)
            if delivered is not None and delivered.ticket in running:
                number, began, posted = running.pop(delivered.ticket)
                samples[number] = _sample(began, posted, ended, delivered)
        return protocol.Moved(samples=[samples[number] for number in range(len(command.refs))])

    def pull_behind(self, command: protocol.PullBehind) -> protocol.Moved:
        """Pull the large one, and small ones while it runs; the last of them may end after it."""
        large_lists = self._blocks(command.large, "sink", 0)
        lists = [self._blocks(command.small, "sink", slot) for slot in range(command.small.slots)]
        large = self._start_pull(command.large_ref, large_lists, command.large)
        large_sample: protocol.Sample | None = None
        samples = []
        for number, ref in enumerate(command.small_refs):
            small = self._start_pull(ref, lists[number % len(lists)], command.small)
            ended: client.Delivered | None = None
            while ended is None or (large_sample is None and number == len(command.small_refs) - 1):
                event = _delivered_or_raise(
                    self._events.next_event(time.perf_counter() + 2 * PULL_DEADLINE_S)
                )
                now = time.perf_counter()
                if event is not None and event.ticket is small[0]:
                    # A small pull that waits until the large one ends is the worst case, so it counts too.
                    ended = event
                    samples.append(_sample(*small[1:], now, event))
                elif event is not None and event.ticket is large[0]:
                    large_sample = _sample(*large[1:], now, event)
            if large_sample is not None:
                break
        assert large_sample is not None
        return protocol.Moved(samples=[large_sample, *samples])

    def _start_pull(
        self, ref: dict[str, Any], blocks: Blocks, case: Case, progressive: bool = False
    ) -> tuple[client.PullTicket, float, float]:
        num_tokens = case.num_tokens
        began = time.perf_counter()
        ticket = self._rank.pull(
            ref,
            blocks=blocks,
            num_tokens=num_tokens,
            deadline_s=PULL_DEADLINE_S,
            progressive=progressive,
        )
        return ticket, began, time.perf_counter()

    # --- content

    def stamp(self, command: protocol.Stamp) -> protocol.CommandDone:
        """Stamp this rank's runs of all slots, after restoring what another case had stamped."""
        former, self._stamped = self._stamped, command.case
        if former is not None and former != command.case:
            for runs in self._sent(former):
                content.unstamp(self._words, runs)
        nonce = stamp_of(command.nonce, self._rank_id)
        for runs in self._sent(command.case):
            content.stamp(self._words, runs, nonce)
        return protocol.CommandDone()

    def wipe(self, command: protocol.Wipe) -> protocol.CommandDone:
        """Wipe this rank's runs of all slots."""
        for slot in range(command.case.slots):
            for runs in reads_of(command.case, self._rank_id, slot).values():
                content.wipe(self._words, runs)
        return protocol.CommandDone()

    def check(self, command: protocol.Check) -> protocol.Checked:
        """Count wrong words."""
        count = content.count_wrong if command.whole else content.count_unstamped
        return protocol.Checked(
            wrong=sum(
                count(self._words, runs, stamp_of(command.nonce, source))
                for slot in range(command.slots)
                for source, runs in reads_of(command.case, self._rank_id, slot).items()
            )
        )

    def _sent(self, case: Case) -> Iterator[Runs]:
        """Yield what sink ranks read from this rank, of all slots."""
        for sink in readers_of(case.deployment, self._rank_id):
            for slot in range(case.slots):
                yield reads_of(case, sink, slot)[self._rank_id]

    def _blocks(self, case: Case, role: Role, slot: int) -> Blocks:
        lists = block_lists(case, role, slot)
        states = {group.name for group in self._layout.groups if group.kind is GroupKind.STATE}
        return {
            name: client.BlockList(ids=ids.data, state_at=case.num_tokens if name in states else -1)
            for name, ids in lists.items()
        }


def _delivered_or_raise(event: client.Event) -> client.Delivered | None:
    if isinstance(event, client.Failed):
        raise KvxferdError(event.message, event.code)
    return event if isinstance(event, client.Delivered) else None


def _sample(began: float, posted: float, ended: float, event: client.Delivered) -> protocol.Sample:
    return protocol.Sample(began, began, posted, ended, event.bytes, event.runs)


def _wait_until(at: float) -> None:
    if (left := at - time.perf_counter()) > 0:
        time.sleep(left)


class RankCommandHandler:
    """Handles commands, the first of which makes the process a rank."""

    def __init__(self) -> None:
        self._rank: BenchRank | None = None

    def handle(self, command: protocol.Command) -> protocol.Reply:
        """Handle one command."""
        if isinstance(command, protocol.StartRank):
            self._rank = BenchRank(command)
            return self._rank.started_reply
        if self._rank is None:
            raise KvxferdError(f"cannot handle {type(command).__name__}: this process is no rank yet")
        return _handle_rank_command(self._rank, command)

    def progress(self) -> bool:
        """Return False: there is no work between commands."""
        return False

    def close(self) -> None:
        """Unregister the rank."""
        if self._rank is not None:
            self._rank.close()


def _handle_rank_command(process: BenchRank, command: protocol.Command) -> protocol.Reply:
    match command:
        case protocol.PublishCommand():
            return process.publish(command)
        case protocol.OpenCommand():
            return process.open(command)
        case protocol.ExtendCommand():
            return process.extend(command)
        case protocol.AwaitRelease():
            return process.await_release(command)
        case protocol.PrepareCommand():
            return process.prepare(command)
        case protocol.AbandonCommand():
            return process.abandon(command)
        case protocol.PullCommand():
            return process.pull(command)
        case protocol.PullBehind():
            return process.pull_behind(command)
        case protocol.Stamp():
            return process.stamp(command)
        case protocol.Wipe():
            return process.wipe(command)
        case protocol.Check():
            return process.check(command)
        case _:
            raise KvxferdError(f"cannot handle {type(command).__name__}: this process is a rank")


if __name__ == "__main__":
    serve_commands(protocol.PROTOCOL, RankCommandHandler)
