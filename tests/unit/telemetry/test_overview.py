"""The verdict on a node, and why its pulls failed: what the page, `top` and `status` show first."""

from __future__ import annotations

import shlex

import msgspec
import pytest

from kvxferd.errors import Code
from kvxferd.ids import Endpoint
from kvxferd.records import LimitSnapshot, PullRecord
from kvxferd.telemetry.overview import Level, NodeVerdict, failure_reasons, peer_lines, verdict_of
from kvxferd.telemetry.remedies import DEFAULT_REMEDY, REMEDIES, remedy_of
from kvxferd.telemetry.samples import PeerRow, Samples
from tests.support.node_samples import PEER, node_snapshot, pull_record

NOW = 1_700_000_000.0


def pull(code: Code | None = None, **changes: object) -> PullRecord:
    record = pull_record("failed" if code else "delivered", code)
    return msgspec.structs.replace(record, **{"ended_at": NOW - 1, **changes})


def verdict(
    *records: PullRecord,
    draining: bool = False,
    oldest_s: float = 0.25,
    limits: tuple[LimitSnapshot, ...] = (),
    **facts: list[str],
) -> NodeVerdict:
    times = iter([0.0])
    samples = Samples(lambda: next(times, 1.0))
    for record in records:
        samples.add(record)
    found = {"reasons": [], "warnings": [], **facts}
    node = node_snapshot(draining=draining)
    waiting = msgspec.structs.replace(node.pulls[0], age_s=oldest_s, waits="in grant: tcp://10.9.9.9:1 waits")
    younger = msgspec.structs.replace(waiting, age_s=0.125, waits="for something else")
    node = msgspec.structs.replace(node, limits=limits, pulls=(younger, waiting))
    return verdict_of(
        node, minute=samples.last_minute(), failed=records[::-1], config_path="/etc/k.toml", **found
    )


def limit(used: int, limit: int) -> LimitSnapshot:
    return LimitSnapshot(name="max_ranks", limit=limit, used=used)


KEYED = Endpoint("tcp://[fd00::7]:9441#" + "ab" * 32)
ELSEWHERE = pull(Code.DEADLINE, peer=Endpoint("tcp://10.9.9.9:1#KEY"))


@pytest.mark.parametrize(
    ("found", "level", "text"),
    [
        (verdict(), Level.GOOD, "Ready. No pull ended in the last 1 s."),
        (verdict(pull()), Level.GOOD, "Ready. 1 pull delivered in the last 1 s, none failed."),
        (verdict(reasons=["no movers"]), Level.BAD, "Not ready: no movers."),
        (
            verdict(pull(), draining=True, reasons=["draining"]),
            Level.WARN,
            "Draining: nothing new is taken. 1 pull delivered in the last 1 s, none failed.",
        ),
        (
            verdict(*[pull()] * 9, ELSEWHERE),
            Level.BAD,
            "Pulls fail: 1 of 10 failed in the last 1 s (10.0 %), most with deadline from tcp://10.9.9.9:1."
            " The last: cannot pull.",
        ),
        (
            verdict(*[pull()] * 199, ELSEWHERE, oldest_s=8.0, warnings=["placement"]),
            Level.WARN,
            "Pulls fail: 1 of 200 failed in the last 1 s (0.5 %), most with deadline from tcp://10.9.9.9:1."
            " The last: cannot pull. The one running pull has run for 8 s, in grant: tcp://10.9.9.9:1 waits."
            " 1 warning: placement.",
        ),
        (
            verdict(warnings=["placement", "placement"]),
            Level.WARN,
            "Ready, but: 2 warnings: placement. No pull ended in the last 1 s.",
        ),
        (
            verdict(pull(), limits=(limit(7, 10), limit(8, 10), limit(0, 0))),
            Level.WARN,
            "Ready, but: 8 of max_ranks = 10 are used. 1 pull delivered in the last 1 s, none failed.",
        ),
    ],
)
def test_the_first_sentence_names_what_is_worst(found: NodeVerdict, level: Level, text: str) -> None:
    assert (found.level, found.text) == (level, text)
    assert bool(found.remedy) == text.startswith("Pulls fail")


def test_a_failing_pull_s_remedy_is_a_command_with_the_peer_s_key_and_this_node_s_settings() -> None:
    found = verdict(pull(Code.PEER_UNREACHABLE, peer=ELSEWHERE.peer))
    assert "run `kvxferd ping 'tcp://10.9.9.9:1#KEY' --config /etc/k.toml`:" in found.remedy


def test_failed_pulls_of_one_reason_are_one_row() -> None:
    failed = [pull(Code.DEADLINE), ELSEWHERE, pull(Code.DEADLINE), pull(Code.BUSY, ended_at=NOW - 901)]
    reasons = failure_reasons(failed, NOW, 900)
    assert [(reason.num_pulls, reason.last.peer) for reason in reasons] == [(2, PEER), (1, ELSEWHERE.peer)]
    assert failure_reasons([], NOW, 900) == []


def test_peers_are_those_that_are_known_and_those_that_pulls_named() -> None:
    rows = [PeerRow(peer="tcp://10.9.9.9:1", failed=2, last_code="deadline"), PeerRow(peer=PEER, delivered=3)]
    named, known = peer_lines(node_snapshot(), rows)
    assert (named.state, named.failed, named.last_reply_s) == ("not connected", 2, None)
    assert (known.state, known.delivered, known.num_grants, known.engines) == ("up", 3, 7, ("prefill-0",))


# --- what to do: a sentence for each code, and commands that a shell takes as they are


@pytest.mark.parametrize("code", Code)
def test_every_code_has_a_sentence_without_a_gap(code: Code) -> None:
    remedy = remedy_of(code, KEYED, "")
    assert remedy
    assert "{" not in remedy
    assert (remedy == DEFAULT_REMEDY) == (code not in REMEDIES)


@pytest.mark.parametrize(
    ("peer", "config_path", "words"),
    [
        (KEYED, "/etc/a b/k.toml", ["kvxferd", "ping", KEYED, "--config", "/etc/a b/k.toml"]),
        (KEYED, "", ["kvxferd", "ping", KEYED]),
        ("x`$(reboot)`; '", "", ["kvxferd", "ping", "x`$(reboot)`; '"]),
        ("", "k.toml", ["kvxferd", "ping", "ENDPOINT", "--config", "k.toml"]),
    ],
)
def test_the_command_can_be_pasted(peer: Endpoint, config_path: str, words: list[str]) -> None:
    remedy = remedy_of(Code.PEER_UNREACHABLE, peer, config_path)
    command = remedy.removeprefix("run `").rpartition("`: it tells")[0]
    assert shlex.split(command) == words
