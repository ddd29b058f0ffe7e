"""`kvxferd doctor --peer`: from this process, through the daemon, and by what pulls really took."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvxferd.config import Config
from kvxferd.doctor.link import judge
from kvxferd.doctor.peer import check_peer
from kvxferd.doctor.report import CheckContext, Finding, Verdict
from kvxferd.errors import Code, KvxferdError
from kvxferd.ids import BootId, Endpoint
from kvxferd.records import PeerSnapshot, PullRecord, ReaderRecord, Record, ReleaseRecord
from kvxferd.telemetry.history import record_to_json
from kvxferd.tooling.control_client import ControlClient
from kvxferd.tooling.engine_process import Pulled
from tests.support.node_samples import StillNode, pull_record, records
from tests.support.served_peer import served_peer
from tests.support.verb_harness import daemon, run

ELSEWHERE = Endpoint("tcp://10.9.9.9:1")


class Daemon(ControlClient):
    """A local daemon with these peers and records."""

    def __init__(self, peers: Sequence[PeerSnapshot], history: Sequence[Record]) -> None:
        super().__init__("/nowhere")
        self._replies: dict[str, Any] = {
            "/v1/peers": {"peers": msgspec.to_builtins(list(peers))},
            "/v1/history": {"records": [record_to_json(record) for record in history]},
        }

    def get(self, path: str) -> Any:
        return self._replies[path]


def peer_at(endpoint: Endpoint, state: str = "up") -> PeerSnapshot:
    return PeerSnapshot(
        endpoint=endpoint, boot=BootId("b"), state=state, engines=(), num_grants=0, round_trip_s=0.002,
        last_reply_s=1.5,
    )  # fmt: skip


def pull(peer: Endpoint, outcome: str = "delivered", code: Code | None = None) -> PullRecord:
    return msgspec.structs.replace(
        pull_record(outcome, code),
        peer=peer,
        bytes=2 << 20,
        phases_s={"wire": 0.001},
        ways={"direct": 2 << 20},
    )


def findings(peer: Endpoint, local: ControlClient) -> dict[str, Finding]:
    context = CheckContext(Config(), local, {})
    return {found.check: found for found in check_peer(context, peer)}


def test_a_peer_that_is_well() -> None:
    release = next(record for record in records() if isinstance(record, ReleaseRecord))
    with served_peer() as served:
        peer = served.address
        reader = ReaderRecord(engine_id=release.engine_id, peers=(peer,), num_ranks=1, bytes=3 << 20)
        history = [pull(peer), pull(peer), pull(ELSEWHERE, "failed", Code.DEADLINE),
                   msgspec.structs.replace(release, readers=(reader,))]  # fmt: skip
        found = findings(peer, Daemon([peer_at(ELSEWHERE, "connecting"), peer_at(peer)], history))
    assert {one.verdict for one in found.values()} == {Verdict.OK}, found
    assert found["reach"].facts["software"] == "1.2.3"
    assert "round trip 2 ms, last reply 1.50 s ago" in found["daemon's connection"].found
    assert found["reads from it"].facts["gigabytes_per_s"] == pytest.approx((2 << 20) / 0.001 / 1e9)
    assert "2 delivered, 0 failed" in found["reads from it"].found
    assert found["reads by it"].facts == {"transfers": 1, "bytes": 3 << 20}


def test_what_is_wrong_is_named_with_what_to_do() -> None:
    with served_peer() as served:
        peer = served.address
    failed = [pull(peer), *[pull(peer, "failed", Code.DEADLINE)] * 2, pull(peer, "failed", Code.RELEASED)]
    found = findings(peer, Daemon([peer_at(peer, "connecting")], failed))
    assert found["reach"].verdict is Verdict.FAIL
    assert found["reach"].essential
    assert found["reach"].facts["outcome"] == "nothing-listens"
    assert found["daemon's connection"].verdict is Verdict.WARN
    assert found["reads from it"].verdict is Verdict.WARN
    assert "1 delivered, 3 failed" in found["reads from it"].found
    assert found["reads from it"].facts["code"] == "deadline"
    assert all(one.todo for one in found.values() if one.verdict is not Verdict.OK)


def test_without_a_daemon_and_without_traffic() -> None:
    with served_peer() as served:
        nobody = findings(served.address, ControlClient("/nowhere/control.sock"))
        assert nobody["reach"].verdict is Verdict.OK
        assert nobody["this node's daemon"].verdict is Verdict.FAIL
        quiet = findings(served.address, Daemon([], []))
    assert {one.verdict for one in quiet.values()} == {Verdict.OK}
    assert "kvxferd doctor --serve" in quiet["link"].todo


async def test_the_verb(tmp_path: Path) -> None:
    with served_peer() as served:
        async with daemon(tmp_path, StillNode()) as local:
            socket = local.control.socket
            done = await run("doctor", "--peer", served.address, "--socket", socket, "--json")
            assert done.exit_code == 0, done.output
            found = json.loads(done.stdout)["findings"]
            assert [one["name"] for one in found] == ["peer"] * 5
            shown = await run("doctor", "--peer", served.address, "--socket", socket)
            assert f"The way to {served.address}" in shown.stdout
            ref = json.dumps(
                dict.fromkeys(("engine_id", "generation", "transfer_id", "nonce"), "x" * 32)
                | {"endpoint": served.address}
            )
            nobody = ("--socket", str(tmp_path / "no.sock"))
            assert (await run("doctor", "--peer", served.address, *nobody)).exit_code == 0
            unmeasured = await run("doctor", "--peer", served.address, "--ref", ref, *nobody)
            assert unmeasured.exit_code == 1, unmeasured.output
    gone = await run("doctor", "--peer", served.address, "--socket", str(tmp_path / "no.sock"))
    assert gone.exit_code == 1
    assert (await run("doctor", "--peer", served.address, "--gpu")).exit_code == 2
    wrong = await run("doctor", "--peer", "ipc:///tmp/x")
    assert wrong.exit_code == 2
    assert not isinstance(wrong.exception, KvxferdError)


@pytest.mark.parametrize(
    ("transports", "verdict", "words"),
    [
        ({"lanes": "cma", "reach": "node", "slow": False}, Verdict.OK, "by cma within one machine"),
        ({"lanes": "tcp", "reach": "node", "slow": True}, Verdict.WARN, "a faster way exists"),
        ({}, Verdict.OK, "by unknown transports; every byte"),
    ],
)
def test_a_link_is_judged_by_the_pulls_behind_the_first(
    transports: dict[str, Any], verdict: Verdict, words: str
) -> None:
    pulls = [Pulled(2.0, 10**9, 32, wire_s) for wire_s in (1.0, 0.5, 0.25, 0.125)]
    found = judge(pulls, {"direct": 4 * 10**9, "covering": 0}, transports)
    assert (found.verdict, bool(found.todo)) == (verdict, verdict is Verdict.WARN)
    assert found.found.startswith("4 GB/s (median of 3 pulls")
    assert "8 at best), read direct by" in found.found
    assert words in found.found


REF = {
    "endpoint": ELSEWHERE, "engine_id": "doctor-1", "generation": "preset", "transfer_id": "t",
    "nonce": "0" * 32,
}  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--peer", ELSEWHERE, "--ref", "{}"), "cannot read the transfer reference"),
        (("--peer", ELSEWHERE, "--ref", "kv"), "cannot read the transfer reference"),
        (("--peer", ELSEWHERE, "--ref", json.dumps(REF | {"nonce": 1})), "cannot read the transfer"),
        (("--peer", "tcp://10.9.9.9:2", "--ref", json.dumps(REF)), f"the reference is of '{ELSEWHERE}'"),
        (("--ref", json.dumps(REF)), "give --peer"),
        (("--serve", "--ref", json.dumps(REF)), "--serve measures nothing here"),
        (("--serve", "--json"), "--serve measures nothing here"),
        (("--serve", "--gpu"), "leave out --gpu"),
    ],
)
async def test_what_is_no_measurement_is_refused(flags: tuple[str, ...], message: str) -> None:
    refused = await run("doctor", *flags)
    assert refused.exit_code == 2 or isinstance(refused.exception, KvxferdError)
    assert message in refused.output + str(refused.exception)
