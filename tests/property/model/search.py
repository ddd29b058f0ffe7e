"""Every order in which two hosts, the messages between them and their clocks can move.

A state is both hosts' states, the messages under way and what may still go wrong. A host's step
depends on its own state and on what it reads of the other alone, so each is worked out once; the
product of the two is then a matter of looking up.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import NamedTuple

from kvxferd.core.sink.pulls import LAST_WORD_S
from kvxferd.wire.codec import PEER_MESSAGES
from tests.property.model.host import OURS, Step
from tests.property.model.scenario import Scenario
from tests.property.model.states import Broken, States, View

MAX_SHOWN = 100  # of the last steps
MAX_CALM = 2000  # steps after which whatever is not over never will be
# What happens when all is well: nobody asks for anything new.
CALM_STEPS = {
    "slice",
    "fence",
    "hear",
    "tick",
    "quiet",
    "report",
    "perish",
    "start",
    "connect",
    "send",
    "read",
}


class State(NamedTuple):
    """Everything, small enough to keep by the million."""

    source: int
    sink: int
    network: tuple[int, ...]  # sorted: any of them may arrive next
    drops: int
    duplicates: int
    clocks: tuple[int, int]  # moves left, of the source's clock and the sink's


Label = tuple[object, ...]


@dataclass
class Found:
    """What an exploration went through."""

    states: int = 0
    moves: int = 0
    ends: int = 0  # states in which only time can help; a calm continuation was followed from each
    source_states: int = 0
    sink_states: int = 0
    core_steps: int = 0
    complete: bool = True

    def as_dict(self) -> dict[str, object]:
        """For a line of JSON."""
        return asdict(self)


class Search:
    """One exploration. `run` raises Broken, with the steps that lead there."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._hosts = {"source": States("source", scenario), "sink": States("sink", scenario)}
        self._messages: list[tuple[str, bytes]] = []  # to whom
        self._numbers: dict[tuple[str, bytes], int] = {}
        self._came: dict[State, tuple[State, Label] | None] = {}
        self._calm: set[tuple[int, int, tuple[int, ...]]] = set()
        self.found = Found()

    def run(self, max_states: int | None = None) -> Found:
        """Explore everything, or that many states. Raises Broken."""
        state = self._first()
        self._came[state] = None
        waiting = [state]
        while waiting:
            state = waiting.pop()
            try:
                self._expand(state, waiting)
            except Broken as broken:
                raise Broken(broken.text, [*self._trace(state), *broken.trace]) from broken
            if max_states is not None and len(self._came) >= max_states:
                self.found.complete = False
                break
        found = self.found
        found.states = len(self._came)
        found.source_states, found.sink_states = (len(hosts) for hosts in self._hosts.values())
        found.core_steps = sum(hosts.num_steps for hosts in self._hosts.values())
        return found

    def _first(self) -> State:
        scenario = self._scenario
        state = State(0, 0, (), scenario.drops, scenario.duplicates, scenario.clocks)
        state = self._begun(state)
        if not scenario.cold:
            state = self._took(state, "sink", ("pull", 0, 1))
            for _ in range(4):  # greeted, and the engine learnt: a grant is asked for
                state = self._arrived(state, state.network[0], keep=False)
        return state

    def _begun(self, state: State) -> State:
        """Every process has joined its daemon, and members their home."""
        for name, step in (("source", ("begin",)), ("sink", ("begin",)), *self._scenario.before):
            state = self._took(state, name, step)
            while (after := self._quietly(state)) is not None:
                state = after
        return state

    def _quietly(self, state: State) -> State | None:
        """Return what follows once a message has arrived; None where none is under way."""
        if state.network:
            return self._arrived(state, state.network[0], keep=False)
        for name in self._hosts:
            for step in self._local_steps(state, name):
                if step[0] in ("send", "read"):
                    return self._took(state, name, step)
        return None

    def _expand(self, state: State, waiting: list[State]) -> None:
        can_move = False
        for label, after in self._moves(state):
            self.found.moves += 1
            can_move = can_move or label[0] != "drop"
            if after not in self._came:
                self._came[after] = (state, label)
                waiting.append(after)
        if not can_move or state.clocks == (0, 0):
            self.found.ends += 1
            self._check_calm(state)

    # --- moves

    def _moves(self, state: State) -> Iterator[tuple[Label, State]]:
        for name in ("source", "sink"):
            for step in self._local_steps(state, name):
                yield (name, *step), self._took(state, name, step)
        for number in dict.fromkeys(state.network):
            if not self._view(state, self._messages[number][0]).is_up:
                continue  # it waits for a daemon
            label = self._messages[number][0], number
            yield ("arrives", *label), self._arrived(state, number, keep=False)
            if state.duplicates:
                after = self._arrived(state, number, keep=True)
                yield ("arrives twice", *label), after._replace(duplicates=state.duplicates - 1)
            if state.drops:
                after = state._replace(network=_without(state.network, number), drops=state.drops - 1)
                yield ("drop", *label), after
        for index, name in enumerate(("source", "sink")):
            clocks = (state.clocks[0] - (index == 0), state.clocks[1] - (index == 1))
            for seconds in self._view(state, name).deadlines:
                is_free = seconds == LAST_WORD_S  # a deadline has passed, and what follows belongs to it
                if is_free or state.clocks[index]:
                    after = self._took(state, name, ("clock", seconds))
                    yield (name, "clock", seconds), after if is_free else after._replace(clocks=clocks)

    def _local_steps(self, state: State, name: str) -> Iterator[Step]:
        view = self._view(state, name)
        yield from view.steps
        for step, agent, place in view.reads:
            content: object = None
            for host in self._hosts:
                if agent in (reach := self._view(state, host).reach):
                    memory, words = reach[agent]
                    content = memory[place] if step[0] == "slice" else words.get(place)
            yield (*step, content)
        if view.due:
            yield ("tick",)

    def _view(self, state: State, name: str) -> View:
        return self._hosts[name].views[state.source if name == "source" else state.sink]

    def _took(self, state: State, name: str, step: Step) -> State:
        is_source = name == "source"
        number, sent = self._hosts[name].take(state.source if is_source else state.sink, step)
        after = state._replace(source=number) if is_source else state._replace(sink=number)
        if step[0] == "crash":
            after = after._replace(network=self._surviving(after.network, name))
        if sent:
            to = "sink" if is_source else "source"
            network = tuple(sorted([*state.network, *(self._number(to, payload) for payload in sent)]))
            after = after._replace(network=network)
        return after

    def _surviving(self, network: tuple[int, ...], name: str) -> tuple[int, ...]:
        """The messages that a daemon's death does not end: answers to it went with its connections."""
        ended = {n for n in network if self._messages[n][0] == name and self._messages[n][1][:1] == OURS}
        return tuple(number for number in network if number not in ended)

    def _arrived(self, state: State, number: int, *, keep: bool) -> State:
        to, payload = self._messages[number]
        before = state if keep else state._replace(network=_without(state.network, number))
        return self._took(before, to, ("peer", payload))

    def _number(self, to: str, payload: bytes) -> int:
        number = self._numbers.setdefault((to, payload), len(self._messages))
        if number == len(self._messages):
            self._messages.append((to, payload))
        return number

    # --- what must come true

    def _check_calm(self, state: State) -> None:
        """Nothing goes wrong any more: everything ends and nothing is left, or Broken."""
        met = []
        labels: list[Label] = []
        try:
            for _ in range(MAX_CALM):
                key = (state.source, state.sink, state.network)
                if key in self._calm:
                    break
                met.append(key)
                if self._is_at_rest(state):
                    if left := self._leftovers(state):
                        raise Broken(f"kept for ever: {', '.join(left)}")
                    break
                for label in self._next_calm(state):
                    labels.append(label)
                    state = self._followed(state, label)
            else:
                left = self._leftovers(state)
                raise Broken(f"kept for ever: it never comes to rest: {', '.join(left)}")
        except Broken as broken:
            raise Broken(broken.text, [self._told(label) for label in labels[-MAX_SHOWN:]]) from broken
        self._calm.update(met)

    def _leftovers(self, state: State) -> tuple[str, ...]:
        return self._view(state, "source").leftovers + self._view(state, "sink").leftovers

    def _is_at_rest(self, state: State) -> bool:
        # A member's heartbeat has no end.
        return not self._next_calm(state) or (
            self._scenario.spans and not state.network and not self._leftovers(state)
        )

    def _next_calm(self, state: State) -> list[Label]:
        """Return what happens next if all is well: messages first, then movers, then time."""
        for number in state.network:
            if self._view(state, to := self._messages[number][0]).is_up:
                return [("arrives", to, number)]
        for name in ("sink", "source"):
            for step in self._local_steps(state, name):
                if step[0] in CALM_STEPS:
                    return [(name, *step)]
        pending = [
            (self._view(state, n).deadlines[0], n) for n in self._hosts if self._view(state, n).deadlines
        ]
        if not pending:
            return []
        seconds, name = min(pending)
        # A member's heartbeat would else keep its home's clock where it is.
        moved = list(self._hosts) if self._scenario.spans else [name]
        return [(host, "clock", seconds) for host in moved]

    def _followed(self, state: State, label: Label) -> State:
        if label[0] == "arrives":
            assert isinstance(label[2], int)
            return self._arrived(state, label[2], keep=False)
        return self._took(state, str(label[0]), label[1:])

    def _trace(self, state: State) -> list[str]:
        labels = []
        came = self._came[state]
        while came is not None:
            state, label = came
            labels.append(label)
            came = self._came[state]
        return [self._told(label) for label in reversed(labels)]

    def _told(self, label: Label) -> str:
        if label[0] in ("arrives", "arrives twice", "drop"):
            assert isinstance(label[2], int)
            return f"{label[0]} at {label[1]}: {_shown(self._messages[label[2]][1])}"
        return " ".join(map(str, label))


def _shown(payload: bytes) -> str:
    """The message, without what is long."""
    message = PEER_MESSAGES.decode(payload[2:])
    values = {field: getattr(message, field) for field in message.__struct_fields__}
    short = [f"{field}={value}" for field, value in values.items() if isinstance(value, str | int)]
    return f"{type(message).__name__}({', '.join(short)})"


def _without(network: tuple[int, ...], number: int) -> tuple[int, ...]:
    at = network.index(number)
    return network[:at] + network[at + 1 :]
