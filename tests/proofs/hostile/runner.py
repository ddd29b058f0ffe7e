"""Runs attacks one after the other, each on a stage that works before it begins."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.proofs.hostile.attacker import play
from tests.proofs.hostile.registry import FDS_SLACK, MAX_EXTRA_MB, MAX_TURN_MS, OUTSIDERS, Attack, Outcome
from tests.proofs.hostile.testbed import Stage

GRACE_S = 5.0  # past an attack's own limit
AFTER_PULLS = 6  # that the pair delivers once the attack is over
AFTER_S = 30.0
REST_S = 20.0  # for descriptors and sessions
GROWN_MB = 12.0  # then the next attack gets another stage, so that it is measured by itself
_CONTEXT = multiprocessing.get_context("fork")


class Runner:
    """`run` plays each attack; `close` takes the stage down."""

    def __init__(self, seed: int, keep: Path | None = None, verbose: bool = False) -> None:
        self._seed = seed
        self._keep = keep
        self._verbose = verbose
        self._stage: Stage | None = None
        self.left_behind: list[str] = []

    def run(self, attacks: Iterable[Attack]) -> list[Outcome]:
        """In an order that makes few stages."""
        chosen = sorted(attacks, key=lambda attack: attack.keys)
        return [self._one(attack) for attack in chosen]

    def close(self) -> None:
        if self._stage is not None:
            stage, self._stage = self._stage, None
            stage.__exit__(None, None, None)
            self.left_behind += stage.problems

    def _ready(self, attack: Attack) -> Stage:
        stage = self._stage
        if stage is not None:
            grown = max(node.rss_mb() for node in stage.nodes.values()) - stage.birth_mb
            if stage.has_keys != attack.keys or attack.fresh or grown > GROWN_MB:
                self.close()
        if self._stage is None:
            keep = self._keep / attack.name if self._keep else None
            self._stage = Stage(has_keys=attack.keys, keep=keep).__enter__()
        return self._stage

    def _one(self, attack: Attack) -> Outcome:
        outcome = Outcome(attack)
        try:
            _Play(self._ready(attack), attack, outcome, self._seed).run()
        except Exception as error:
            outcome.problems.append(f"the suite itself: {error!r}")
        if not outcome.survived:
            self.close()
        if self._verbose:
            print(row_of(outcome), file=sys.stderr, flush=True)
        return outcome


class _Play:
    """One attack on one stage."""

    def __init__(self, stage: Stage, attack: Attack, outcome: Outcome, seed: int) -> None:
        self._stage = stage
        self._attack = attack
        self._outcome = outcome
        self._seed = seed

    def run(self) -> None:
        stage, outcome = self._stage, self._outcome
        began = time.monotonic()
        stage.begin_traffic()
        before = {name: (node.num_fds(), node.rss_mb()) for name, node in stage.nodes.items()}
        self._sessions = {name: _sessions(node.status_if_any()) for name, node in stage.nodes.items()}
        self._before = before
        for node in stage.nodes.values():
            node.reset()
        self._play()
        self._look_after()
        outcome.elapsed_s = time.monotonic() - began
        self._judge()

    def _play(self) -> None:
        ours, theirs = _CONTEXT.Pipe()
        limit_s = self._attack.limit_s
        process = _CONTEXT.Process(target=play, args=(self._stage, self._attack, self._seed, limit_s, theirs))
        process.start()
        theirs.close()
        until = time.monotonic() + limit_s + GRACE_S
        try:
            while not self._serve(ours):
                self._watch()
                if time.monotonic() > until:
                    self._outcome.problems.append("the attack did not end in time")
                    break
        finally:
            _end(process)
            ours.close()

    def _serve(self, pipe: Any) -> bool:
        """Do what the attacker asks for; whether it is over."""
        if not pipe.poll(0.0):
            self._stage.pump(0.02)
            return False
        try:
            what, arguments = pipe.recv()
        except EOFError:
            self._outcome.problems.append("the attacker's process ended without a word")
            return True
        if what == "over":
            self._outcome.note = arguments["note"]
            if arguments["found"]:
                self._outcome.problems.append(arguments["found"])
            return True
        if what == "broken":
            self._outcome.problems.append("the attack itself is broken: " + arguments["trace"][-1500:])
            return True
        pipe.send(getattr(self._stage, "do_" + what)(**arguments))
        return False

    def _watch(self) -> None:
        for name, node in self._stage.nodes.items():
            self._outcome.fds = max(self._outcome.fds, node.num_fds() - self._before[name][0])

    def _look_after(self) -> None:
        stage, outcome = self._stage, self._outcome
        for name, node in stage.nodes.items():
            if problem := node.health():
                outcome.problems.append(f"{name}: {problem}")
        if any(node.exit_code is not None for node in stage.nodes.values()):
            return  # nothing more comes
        target = stage.traffic.done + AFTER_PULLS
        if not stage.pump_until(lambda: stage.traffic.done >= target, AFTER_S):
            outcome.problems.append("the honest pair delivers nothing after the attack")
        if not stage.pump_until(self._is_at_rest, REST_S):
            outcome.problems.append(f"not at rest: {self._unrest()}")
        outcome.fds_left = max(n.num_fds() - self._before[name][0] for name, n in stage.nodes.items())

    def _is_at_rest(self) -> bool:
        return not self._unrest()

    def _unrest(self) -> str:
        for name, node in self._stage.nodes.items():
            more = node.num_fds() - self._before[name][0]
            if more > FDS_SLACK:
                return f"{name} has {more} descriptors more than before"
            sessions = _sessions(node.status_if_any())
            if sessions > self._sessions[name]:
                return f"{name} has {sessions} sessions, {self._sessions[name]} before"
        return ""

    def _judge(self) -> None:
        stage, outcome, attack = self._stage, self._outcome, self._attack
        traffic = stage.traffic
        outcome.turn_ms = max(node.meter.read()[0] for node in stage.nodes.values())
        outcome.extra_mb = max(n.rss_mb("VmHWM") - self._before[name][1] for name, n in stage.nodes.items())
        outcome.honest, outcome.failed, outcome.wrong = traffic.done, traffic.failed, traffic.wrong
        outcome.slowest_ms = traffic.slowest_ms
        if traffic.wrong:
            outcome.problems.append(f"{traffic.wrong} wrong items")
        if traffic.failed:
            outcome.problems.append(f"{traffic.failed} honest pulls failed: {'; '.join(traffic.why)}")
        if outcome.turn_ms > MAX_TURN_MS:
            outcome.problems.append(f"a turn of the loop took {outcome.turn_ms:.0f} ms")
        if attack.who in OUTSIDERS and outcome.extra_mb > MAX_EXTRA_MB:
            outcome.problems.append(f"it cost {outcome.extra_mb:.0f} MB")


def _sessions(status: Any) -> int:
    return int(status["num_sessions"]) if status else 1 << 30


def _end(process: BaseProcess) -> None:
    """The attacker and whatever it has started, which is in its session's process group."""
    assert process.pid is not None
    with suppress(ProcessLookupError):
        if os.getpgid(process.pid) == process.pid:
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
    process.join(10)


def row_of(outcome: Outcome) -> str:
    """A line for people."""
    attack = outcome.attack
    verdict = "survived" if outcome.survived else "NOT SURVIVED: " + " | ".join(outcome.problems)
    return (
        f"{attack.name:34} {attack.who:9} {outcome.elapsed_s:5.1f} s {outcome.turn_ms:7.1f} ms/turn "
        f"{outcome.extra_mb:6.1f} MB {outcome.fds:5d} fds {outcome.honest:4d} pulls "
        f"{outcome.failed:3d} failed {outcome.slowest_ms:7.0f} ms  {verdict}"
        + (f"  ({outcome.note})" if outcome.note else "")
    )
