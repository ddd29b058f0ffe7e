"""The real pull engine with covering reads, while sources stop, fail and let go, and scatters take time.

Whatever happens: what is delivered holds the bytes that its fence word stood for, no byte of a block changes
once its pull has ended without doubt, every pull ends once, and each chunk is free or lost in the end.
"""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import numpy.typing as npt
import pytest

from kvxferd.ids import PullId
from kvxferd.mover.process.chunks import ChunkState
from kvxferd.mover.process.covering_reads import CoveringReads
from kvxferd.mover.process.pull_state import PullState
from kvxferd.mover.transport.base import TransportError
from kvxferd.wire.mover import ChunkMemoryGranted, DisconnectSeen, PullDone, PullOutcome, PullQuiesced
from tests.support.pull_engine_harness import BLOCKS, HEAD, Bench, ManualScatterer

STEPS = 400
NUM_IDS = 12
Content = npt.NDArray[np.uint8]


class Faults:
    """One run from one seed."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.scatterer = ManualScatterer()
        self.chunk_bytes = self.rng.choice([1 << 10, 16 << 10])  # a part of a pull, or all of it
        max_chunks = self.rng.randint(1, 4)
        self.bench = Bench(chunk_bytes=self.chunk_bytes, max_chunks=max_chunks, scatterer=self.scatterer)
        self.bench.fabric.polls_per_read = self.rng.choice([0, 2, 6])
        self.counts: Counter[str] = Counter()
        self.word = bytes(self.bench.fence.page[0:16])
        self.contents: dict[bytes, list[Content]] = {}  # of both sources, while the word was this
        self.keep_content()
        self.pulls: dict[PullId, tuple[list[int], bytes]] = {}
        self.outcomes: dict[PullId, PullOutcome] = {}
        self.quiet: dict[PullId, Content] = {}  # the blocks of pulls that nothing may write any more
        self.asked: list[int] = []

    def keep_content(self) -> None:
        self.contents[self.word] = [memory.array.copy() for memory in self.bench.remote]

    def blocks_here(self, ids: list[int]) -> Content:
        """Return a copy of (tensors, blocks, tokens, heads, bytes)."""
        return self.bench.local.array.reshape(4, BLOCKS, 4, 2, HEAD)[:, ids].copy()

    # --- things that happen

    def start(self) -> None:
        taken = {
            block for number, (ids, _) in self.pulls.items() if number not in self.quiet for block in ids
        }
        free = [block for block in range(BLOCKS) if block not in taken]
        if len(free) < 2 * NUM_IDS or len(taken) > 10 * NUM_IDS:
            return
        ids = self.rng.sample(free, NUM_IDS)
        for number in [n for n, (old, _) in self.pulls.items() if set(old) & set(ids)]:
            del self.pulls[number], self.quiet[number]  # its blocks are another pull's now
        number = self.bench.start(ids, self.word)  # type: ignore[arg-type]
        self.pulls[number] = (ids, self.word)

    def let_go(self) -> None:
        """The source takes the blocks back, and writes others there at once."""
        if self.rng.random() < 0.5:
            self.word = self.rng.randbytes(16)
            self.bench.fence.page[0:16] = self.word
            for memory in self.bench.remote:
                memory.array[:] = np.frombuffer(self.rng.randbytes(len(memory.array)), dtype=np.uint8)
            self.keep_content()

    def stop_or_go_on(self) -> None:
        self.bench.fabric.stalled ^= {self.rng.choice(self.bench.agents)}

    def fail(self) -> None:
        settled, lost = self.rng.choice([(True, False), (True, True), (False, True), (False, False)])
        if (settled or lost) or self.rng.random() < 0.2:
            agent = self.rng.choice(self.bench.agents)
            self.bench.fabric.errors[agent] = TransportError("on purpose", settled=settled, lost=lost)

    def abort(self) -> None:
        running = [number for number in self.pulls if number not in self.outcomes]
        if running:
            self.bench.engine.abort(self.rng.choice(running))

    def judge(self) -> None:
        if self.asked:
            over = self.rng.random() < 0.8
            self.counts["not proved over"] += not over
            self.bench.disconnects.handle_reply(self.asked.pop(0), over)

    def grant(self) -> None:
        size = self.rng.randint(0, 4) * self.chunk_bytes
        self.bench.engine.set_chunk_memory(ChunkMemoryGranted(size))

    def copy(self) -> None:
        for _ in range(self.rng.randint(1, 6)):
            self.scatterer.copy_once()

    def work(self) -> None:
        for _ in range(self.rng.randint(1, 10)):
            self.bench.engine.step()
            self.hear()
        self.bench.now += self.rng.choice([0.0, 1e-4, 1e-2, 3e-2])

    def step(self) -> None:
        acts = [self.start, self.start, self.let_go, self.stop_or_go_on, self.fail, self.abort, self.judge]
        acts += [self.grant, self.copy, self.copy, self.copy, self.work, self.work, self.work, self.work]
        self.rng.choice(acts)()
        self.hear()
        self.check()

    # --- what must hold

    def hear(self) -> None:
        for message in self.bench.engine.outbox:
            if isinstance(message, DisconnectSeen):
                self.asked.append(message.number)
            elif isinstance(message, PullDone):
                assert message.pull not in self.outcomes, "a pull ended twice"
                self.ended(message.pull, message.outcome)
            elif isinstance(message, PullQuiesced):
                self.counts["quiesced"] += 1
                self.quiet[message.pull] = self.blocks_here(self.pulls[message.pull][0])
        self.bench.engine.outbox.clear()

    def ended(self, number: PullId, outcome: PullOutcome) -> None:
        self.outcomes[number] = outcome
        self.counts["delivered" if outcome.delivered else str(outcome.code)] += 1
        self.counts["covered" if outcome.covered_bytes else "direct"] += 1
        ids, word = self.pulls[number]
        here = self.blocks_here(ids)
        if outcome.delivered:
            for rank, content in enumerate(self.contents[word]):
                assert (here[..., rank, :] == content.reshape(4, BLOCKS, 4, HEAD)[:, ids]).all(), (
                    "wrong bytes"
                )
        if outcome.finished:
            self.quiet[number] = here
        else:
            self.counts["in doubt"] += 1

    def check(self) -> None:
        for number, before in self.quiet.items():
            assert (self.blocks_here(self.pulls[number][0]) == before).all(), "written after its end"

    def settle(self) -> None:
        """Sources go on, the daemon answers, and copies are made."""
        self.bench.fabric.stalled.clear()
        self.bench.fabric.errors.clear()
        for _ in range(2000):
            self.bench.now += 1e-3
            self.bench.engine.step()
            self.scatterer.copy_once()
            self.hear()
            self.judge()
        self.check()


@pytest.mark.parametrize("seed", range(40))
def test_faults_write_no_wrong_byte(seed: int) -> None:
    run = Faults(seed)
    for _ in range(STEPS):
        run.step()
    run.settle()
    assert set(run.pulls) <= set(run.outcomes)
    for number in run.pulls:
        # What the daemon cannot prove to be over is in doubt until the mover is dead.
        is_for_ever = not run.outcomes[number].quiet_follows or run.counts["not proved over"]
        assert number in run.quiet or is_for_ever, "in doubt for ever"
    assert not run.bench.engine.is_busy or any(not o.quiet_follows for o in run.outcomes.values())
    assert run.bench.chunks is not None
    assert all(one.state in {ChunkState.FREE, ChunkState.LOST} for one in run.bench.chunks._chunks)


@pytest.mark.slow
def test_faults_really_happen() -> None:
    """The runs above deliver, cancel, fail, let go and doubt, by chunks and directly."""
    total: Counter[str] = Counter()
    for seed in range(12):
        run = Faults(seed)
        for _ in range(STEPS):
            run.step()
        run.settle()
        total += run.counts
    wanted = ["delivered", "cancelled", "transport", "released", "covered", "direct", "in doubt", "quiesced"]
    wanted += ["not proved over"]
    assert all(total[name] > 0 for name in wanted), total


@pytest.mark.slow
@pytest.mark.slow
@pytest.mark.parametrize("bug", ["early-fence", "early-end"])
def test_the_checks_can_fail(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A word that is read before the last chunk is, and an end that waits for no scatter, are noticed."""
    if bug == "early-fence":
        monkeypatch.setattr(PullState, "num_chunks_read", property(lambda pull: 0))
    else:
        monkeypatch.setattr(CoveringReads, "let_go", lambda self, pull: pull.covering.clear())
    found = 0
    for seed in range(40):
        run = Faults(seed)
        try:
            for _ in range(STEPS):
                run.step()
        except AssertionError:
            found += 1
            break
    assert found
