"""What reads cost: a model of two constants for each remote agent, and one for copies here.

    direct    descriptors * descriptor_s + bytes / bytes_per_s
    covering  descriptors * descriptor_s + covered bytes / bytes_per_s, beside bytes / copy_bytes_per_s

Stretches that follow one another in the source are one descriptor. A pull takes `PULL_S` more, either way.
A scatter runs beside the next chunk's read. So the longer one counts, and the last chunk's copy.

The constants start where CMA was measured, and every slice corrects them. A slice changes each constant by
the part that it had in the prediction: many small runs teach the time of a descriptor, few long ones the
bandwidth. So no name of a card and no count of blocks decides.

A pull is more than its slices: it waits between them, and several agents are read at one time. `learn_pull`
corrects for that, by one factor for each agent and way.

The first read from an agent waits until the connection is made: it teaches nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from kvxferd.ids import AgentName, Rank
from kvxferd.plan.covering import FormCount, always
from kvxferd.plan.stretches import StretchForm

# Of CMA on two cores: 262,144 runs of 256 bytes took 621 ms, and 64 MiB in one run 7 ms.
START_DESCRIPTOR_S = 2.3e-6
START_BYTES_PER_S = 8e9
START_COPY_BYTES_PER_S = 4e9
LEARNING_RATE = 0.25
# A shorter slice is mostly a round trip and the pause between two polls, which are no descriptor's.
MIN_LEARNT_S = 0.2e-3
# A pull has three in flight. Of more that follow one another, those that overlap at the ends matter less.
MAX_SLICES_TOGETHER = 8
MAX_CORRECTION = 4.0  # of slices that count together: one that waited for the processor teaches little
MIN_DESCRIPTOR_S, MAX_DESCRIPTOR_S = 0.05e-6, 50e-6
MIN_BYTES_PER_S, MAX_BYTES_PER_S = 1e7, 1e12
# A prediction is right within a factor of about 1.5. What gains less is not worth a copy of all bytes.
MIN_GAIN = 1.3
MIN_GAIN_S = 0.3e-3
CHUNK_TAIL_BYTES = 4 << 20
MAX_PULL_CORRECTION = 2.5
PULL_LEARNING_RATE = 0.4
FORGETTING = 0.95  # of the other way's correction, with each pull: a way that is not chosen gets its chance
MIN_LEARNT_PULL_S = 1e-3
# What a pull takes on top, however little it reads: with long runs 4 MiB took 1.35 ms and 64 MiB 15.3.
PULL_S = 0.4e-3


class ReadShape(NamedTuple):
    """The size of reads, whatever their way."""

    num_descriptors: int
    num_bytes: int


@dataclass(slots=True)
class LinkCosts:
    """The constants of one remote agent."""

    descriptor_s: float = START_DESCRIPTOR_S
    bytes_per_s: float = START_BYTES_PER_S
    last_done_at: float = 0.0  # when the last slice from it was done
    # How much longer whole pulls take than their slices, or shorter, by the way that they were read in.
    direct_correction: float = 1.0
    covering_correction: float = 1.0
    # What was read and is not learnt from yet.
    _slices: ReadShape = field(default=ReadShape(0, 0), compare=False)
    _elapsed_s: float = field(default=0.0, compare=False)
    _num_slices: int = field(default=0, compare=False)

    @property
    def is_connected(self) -> bool:
        """Whether a read from it was done."""
        return self.last_done_at > 0.0

    def predict_s(self, read: ReadShape) -> float:
        """Return how long the network takes for it."""
        return read.num_descriptors * self.descriptor_s + read.num_bytes / self.bytes_per_s

    def learn(self, read: ReadShape, posted_at: float, done_at: float) -> None:
        """Correct the constants by a slice, some time: slices that overlap count together.

        Slices of one agent follow one another on the wire, and several are seen to be done at one time: the
        first of them seems to take as long as all, and the others no time.
        """
        if not self.is_connected:
            self.last_done_at = done_at
            return
        is_full = self._num_slices >= MAX_SLICES_TOGETHER and done_at > self.last_done_at
        if is_full or posted_at > self.last_done_at:
            self.flush()
        self._elapsed_s += max(0.0, done_at - max(posted_at, self.last_done_at))
        self._slices = ReadShape(*(one + other for one, other in zip(self._slices, read, strict=True)))
        self._num_slices += 1
        self.last_done_at = done_at

    def flush(self) -> None:
        """Correct the constants by what `learn` has collected."""
        read, elapsed_s, rate = self._slices, self._elapsed_s, 1 - (1 - LEARNING_RATE) ** self._num_slices
        self._slices, self._elapsed_s, self._num_slices = ReadShape(0, 0), 0.0, 0
        by_descriptors = read.num_descriptors * self.descriptor_s
        predicted_s = self.predict_s(read)
        if elapsed_s <= 0.0 or predicted_s < MIN_LEARNT_S:
            return
        ratio = min(max(elapsed_s / predicted_s, 1 / MAX_CORRECTION), MAX_CORRECTION)
        share = by_descriptors / predicted_s
        descriptor_s = self.descriptor_s * ratio ** (rate * share)
        bytes_per_s = self.bytes_per_s / ratio ** (rate * (1 - share))
        self.descriptor_s = min(max(descriptor_s, MIN_DESCRIPTOR_S), MAX_DESCRIPTOR_S)
        self.bytes_per_s = min(max(bytes_per_s, MIN_BYTES_PER_S), MAX_BYTES_PER_S)

    def correct(self, ratio: float, is_covered: bool) -> None:
        """Correct by a pull that took `ratio` times as long as was predicted."""
        ratio = min(max(ratio, 1 / MAX_CORRECTION), MAX_CORRECTION) ** PULL_LEARNING_RATE
        direct, covering = self.direct_correction, self.covering_correction
        if is_covered:
            direct, covering = direct**FORGETTING, covering * ratio
        else:
            direct, covering = direct * ratio, covering**FORGETTING
        self.direct_correction = min(max(direct, 1 / MAX_PULL_CORRECTION), MAX_PULL_CORRECTION)
        self.covering_correction = min(max(covering, 1 / MAX_PULL_CORRECTION), MAX_PULL_CORRECTION)


@dataclass(slots=True)
class Choice:
    """How one pull reads from each rank."""

    # Of the ranks that it reads from; none where it has to connect, so that its time teaches nothing.
    agents: dict[Rank, AgentName] = field(default_factory=dict)
    covered: dict[Rank, frozenset[StretchForm]] = field(
        default_factory=dict
    )  # ranks without any are left out
    direct_s: float = 0.0  # how long the pull takes if all its reads are direct
    chosen_s: float = 0.0  # and as chosen; neither counts `PULL_S`

    def pays(self, rank: Rank, form: StretchForm) -> bool:
        """Whether stretches of this form are covered."""
        return form in self.covered.get(rank, ())


class CostModel:
    """The constants of all agents that a mover reads from."""

    def __init__(self) -> None:
        self._links: dict[AgentName, LinkCosts] = {}
        self.copy_bytes_per_s = START_COPY_BYTES_PER_S

    def link(self, agent: AgentName) -> LinkCosts:
        """Return the constants of an agent."""
        return self._links.setdefault(agent, LinkCosts())

    def learn(self, agent: AgentName, read: ReadShape, posted_at: float, done_at: float) -> None:
        """Correct an agent's constants by one slice. One that was dropped meanwhile stays forgotten."""
        if (link := self._links.get(agent)) is not None:
            link.learn(read, posted_at, done_at)

    def learn_pull(self, choice: Choice, elapsed_s: float) -> None:
        """Correct by a pull that was read as chosen, and alone: from its first post to its last copy."""
        for rank, agent in choice.agents.items():
            if (link := self._links.get(agent)) is None:
                continue
            link.flush()
            if choice.chosen_s >= MIN_LEARNT_PULL_S:
                link.correct((elapsed_s - PULL_S) / choice.chosen_s, rank in choice.covered)

    def forget(self, agent: AgentName) -> None:
        """Forget an agent that was dropped."""
        self._links.pop(agent, None)

    def learn_copy(self, num_bytes: int, elapsed_s: float) -> None:
        """Correct the speed of copies by one chunk's scatter."""
        if num_bytes and elapsed_s > 0.0:
            ratio = elapsed_s * self.copy_bytes_per_s / num_bytes
            ratio = min(max(ratio, 1 / MAX_CORRECTION), MAX_CORRECTION)
            speed = self.copy_bytes_per_s / ratio**LEARNING_RATE
            self.copy_bytes_per_s = min(max(speed, MIN_BYTES_PER_S), MAX_BYTES_PER_S)

    def choose(
        self,
        forms: Iterable[FormCount],
        agents: dict[Rank, AgentName],
        can_cover: Callable[[Rank, StretchForm], bool] = always,
    ) -> Choice:
        """Choose for each rank and form the way that is predicted to take less, of those that there are."""
        by_rank: dict[Rank, dict[StretchForm, tuple[int, int]]] = {}
        for rank, form, num_stretches, num_descriptors in forms:
            counts = by_rank.setdefault(rank, {})
            stretches, descriptors = counts.get(form, (0, 0))
            counts[form] = stretches + num_stretches, descriptors + num_descriptors
        choice = Choice()
        if all(self.link(agents[rank]).is_connected for rank in by_rank):
            choice.agents = {rank: agents[rank] for rank in by_rank}
        for rank, counts in by_rank.items():
            self._choose_for(choice, rank, counts, self.link(agents[rank]), can_cover)
        return choice

    def _choose_for(
        self,
        choice: Choice,
        rank: Rank,
        counts: dict[StretchForm, tuple[int, int]],
        link: LinkCosts,
        can_cover: Callable[[Rank, StretchForm], bool],
    ) -> None:
        direct_s = rest_s = read_s = copy_s = 0.0
        covered = []
        for form, (count, num_descriptors) in counts.items():
            by_runs = count * link.predict_s(ReadShape(form.num_copies, form.num_bytes))
            by_stretches = link.predict_s(ReadShape(num_descriptors, count * form.size_bytes))
            copies = count * form.num_bytes / self.copy_bytes_per_s
            direct_s += by_runs
            # A stretch of one copy is a run, and runs that follow one another are one descriptor too.
            is_shorter = form.num_copies > 1 and max(by_stretches, copies) < by_runs
            if is_shorter and can_cover(rank, form):
                covered.append(form)
                read_s += by_stretches
                copy_s += copies
            else:
                rest_s += by_runs
        tail_s = min(copy_s, CHUNK_TAIL_BYTES / self.copy_bytes_per_s)
        chosen_s = (rest_s + max(read_s, copy_s) + tail_s) * link.covering_correction
        direct_s *= link.direct_correction
        choice.direct_s += direct_s
        if not covered or direct_s < chosen_s * MIN_GAIN or direct_s - chosen_s < MIN_GAIN_S:
            choice.chosen_s += direct_s
            return
        choice.chosen_s += chosen_s
        choice.covered[rank] = frozenset(covered)
