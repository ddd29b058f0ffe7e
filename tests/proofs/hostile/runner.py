"""Runs attacks one after the other, each on a stage that works before it begins."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.proofs.hostile.attack import OUTSIDERS, Attack, play
from tests.proofs.hostile.stage import Stage, Traffic
from tests.support.nodes.waiting import comes_true

MAX_EXTRA_MB = 100.0  # of an outsider
MAX_TURN_MS = 100.0
FDS_SLACK = 32  # descriptors that may be open afterwards, and were not before: of eight peers that are known
GRACE_S = 5.0  # past an attack's own limit
AFTER_PULLS = 6  # that are delivered once the attack is over
AFTER_S = 30.0
REST_S = 20.0  # for descriptors and sessions
GROWN_MB = 12.0  # then the next attack gets another stage, so that it is measured by itself
_CONTEXT = multiprocessing.get_context("fork")


@dataclass
class Outcome:
    """How one attack went."""

    attack: Attack
    elapsed_s: float = 0.0
    turn_ms: float = 0.0
    extra_mb: float = 0.0
    fds: int = 0  # most open above idle
    traffic: Traffic = field(default_factory=Traffic)  # of the honest engines
    note: str = ""
    problems: list[str] = field(default_factory=list)

    @property
    def survived(self) -> bool:
        return not self.problems

    def __str__(self) -> str:
        attack, traffic = self.attack, self.traffic
        verdict = "survived" if self.survived else "NOT SURVIVED: " + " | ".join(self.problems)
        return (
            f"{attack.name:34} {attack.who:9} {self.elapsed_s:5.1f} s {self.turn_ms:7.1f} ms/turn "
            f"{self.extra_mb:6.1f} MB {self.fds:5d} fds {traffic.done:4d} pulls "
            f"{len(traffic.failures):3d} failed {1e3 * traffic.slowest_s:7.0f} ms  {verdict}"
            + (f"  ({self.note})" if self.note else "")
        )


class Runner:
    """`run` plays each attack; `close` takes the stage down."""

    def __init__(self, seed: int, keep: Path | None = None) -> None:
        self._seed = seed
        self._keep = keep
        self._stage: Stage | None = None
        self.left_behind: list[str] = []

    def run(self, attacks: Iterable[Attack]) -> list[Outcome]:
        """Play them in an order that makes few stages."""
        return [self._one(attack) for attack in sorted(attacks, key=lambda attack: attack.keys)]

    def close(self) -> None:
        if self._stage is not None:
            stage, self._stage = self._stage, None
            self.left_behind += stage.close()

    def _one(self, attack: Attack) -> Outcome:
        outcome = Outcome(attack)
        try:
            _Play(self._ready(attack), outcome, self._seed).run()
        except Exception as error:
            outcome.problems.append(f"the suite itself: {error!r}")
        if not outcome.survived:
            self.close()
        print(outcome, file=sys.stderr, flush=True)
        return outcome

    def _ready(self, attack: Attack) -> Stage:
        stage = self._stage
        if stage is not None:
            has_grown = stage.rss_mb() - stage.birth_mb > GROWN_MB
            if stage.has_keys != attack.keys or attack.fresh or has_grown:
                self.close()
        if self._stage is None:
            self._stage = Stage(has_keys=attack.keys, keep=self._keep and self._keep / attack.name)
        return self._stage


class _Play:
    """One attack on one stage."""

    def __init__(self, stage: Stage, outcome: Outcome, seed: int) -> None:
        self._stage = stage
        self._nodes = stage.nodes.values()
        self._outcome = outcome
        self._seed = seed
        self._fds = {node: node.num_fds for node in self._nodes}  # before it
        self._sessions = {node: node.num_sessions for node in self._nodes}
        self._rss_mb = {node: node.rss_mb() for node in self._nodes}

    def run(self) -> None:
        outcome, stage = self._outcome, self._stage
        began = time.monotonic()
        stage.count_anew()
        for node in self._nodes:
            node.measure_anew()
        if self._let_play() and not self._is_ill():
            for spare in stage.spares:
                if not spare.leave():
                    outcome.problems.append("an honest engine that the attack used cannot leave")
            target = stage.traffic().done + AFTER_PULLS
            if not comes_true(lambda: stage.traffic().done >= target, AFTER_S):
                outcome.problems.append("the honest engines deliver nothing after the attack")
            if not comes_true(lambda: not self._unrest(), REST_S):
                outcome.problems.append(f"not at rest: {self._unrest()}")
        outcome.elapsed_s = time.monotonic() - began
        self._judge()

    def _let_play(self) -> bool:
        """Return whether it ended by itself: else a spare may still do what it asked for."""
        outcome, attack = self._outcome, self._outcome.attack
        ours, theirs = _CONTEXT.Pipe(duplex=False)
        process = _CONTEXT.Process(target=play, args=(self._stage, attack, self._seed, theirs))
        process.start()
        theirs.close()
        until = time.monotonic() + attack.limit_s + GRACE_S
        try:
            while not ours.poll(0.02) and time.monotonic() < until:
                outcome.fds = max(outcome.fds, *(node.num_fds - self._fds[node] for node in self._nodes))
            if not ours.poll():
                outcome.problems.append("the attack did not end in time")
                return False
            found, outcome.note, trace = ours.recv()
        except EOFError:
            outcome.problems.append("the attacker's process ended without a word")
            return False
        finally:
            _end(process)
            ours.close()
        outcome.problems += [found] if found else []
        outcome.problems += [f"the attack itself is broken: {trace}"] if trace else []
        return True

    def _is_ill(self) -> bool:
        """Note what is wrong with the daemons; return whether one has ended: nothing more comes then."""
        problems = [f"{node.name}: {problem}" for node in self._nodes if (problem := node.health())]
        self._outcome.problems += problems
        return any(node.exit_code is not None for node in self._nodes)

    def _unrest(self) -> str:
        for node in self._nodes:
            if (more := node.num_fds - self._fds[node]) > FDS_SLACK:
                return f"{node.name} has {more} descriptors more than before"
            if (sessions := node.num_sessions) > self._sessions[node]:
                return f"{node.name} has {sessions} sessions, {self._sessions[node]} before"
        return ""

    def _judge(self) -> None:
        outcome, traffic = self._outcome, self._stage.traffic()
        outcome.traffic = traffic
        outcome.turn_ms = max(float(node.longest_turn_ms[0]) for node in self._nodes)
        outcome.extra_mb = max(node.rss_mb("VmHWM") - self._rss_mb[node] for node in self._nodes)
        if traffic.wrong:
            outcome.problems.append(f"{traffic.wrong} wrong items")
        if why := traffic.failures:
            outcome.problems.append(f"{len(why)} honest pulls failed: {'; '.join(why[:3])}")
        if outcome.turn_ms > MAX_TURN_MS:
            outcome.problems.append(f"a turn of the loop took {outcome.turn_ms:.0f} ms")
        if outcome.attack.who in OUTSIDERS and outcome.extra_mb > MAX_EXTRA_MB:
            outcome.problems.append(f"it cost {outcome.extra_mb:.0f} MB")


def _end(process: BaseProcess) -> None:
    """The attacker and whatever it has started, which is in its session's process group."""
    assert process.pid is not None
    with suppress(ProcessLookupError):
        if os.getpgid(process.pid) == process.pid:
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
    process.join(10)
