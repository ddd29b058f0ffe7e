"""`kvxferd doctor --link`: how its pulls are judged, and what is no measurement."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvxferd.doctor.link import judge
from kvxferd.doctor.report import Verdict
from kvxferd.errors import KvxferdError
from kvxferd.tooling.engine_process import Pulled
from tests.support.served_peer import served_peer
from tests.support.verb_harness import run

REF = {
    "endpoint": "tcp://127.0.0.1:1", "engine_id": "doctor-1", "generation": "preset", "transfer_id": "t",
    "nonce": "0" * 32,
}  # fmt: skip


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
    found = judge([Pulled(2.0, 10**9, 32, wire_s) for wire_s in (1.0, 0.5, 0.25, 0.125)], transports)
    assert (found.verdict, bool(found.todo)) == (verdict, verdict is Verdict.WARN)
    assert found.found.startswith("4 GB/s (median of 3 pulls")
    assert "8 at best)" in found.found
    assert words in found.found


async def test_what_is_not_reached_and_a_node_without_a_daemon_are_not_measured(tmp_path: Path) -> None:
    nobody = ("--socket", str(tmp_path / "no.sock"), "--json")
    unreached = await run("doctor", "--link", json.dumps(REF), *nobody)
    assert unreached.exit_code == 1
    (reach,) = json.loads(unreached.stdout)["findings"]
    assert (reach["check"], reach["facts"]["outcome"]) == ("reach", "nothing-listens")
    with served_peer() as peer:
        unmeasured = await run("doctor", "--link", json.dumps(REF | {"endpoint": peer.address}), *nobody)
    assert unmeasured.exit_code == 1
    reach, link = json.loads(unmeasured.stdout)["findings"]
    assert (reach["verdict"], link["verdict"]) == ("ok", "no")
    assert "no daemon is there" in link["found"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--link", "{}"), "cannot read the transfer reference"),
        (("--link", "kv"), "cannot read the transfer reference"),
        (("--link", json.dumps(REF | {"nonce": 1})), "cannot read the transfer"),
        (("--serve", "--link", json.dumps(REF)), "--serve measures nothing here"),
        (("--serve", "--json"), "--serve measures nothing here"),
        (("--serve", "--gpu"), "leave out --gpu"),
    ],
)
async def test_what_is_no_measurement_is_refused(flags: tuple[str, ...], message: str) -> None:
    refused = await run("doctor", *flags)
    assert refused.exit_code == 2 or isinstance(refused.exception, KvxferdError)
    assert message in refused.output + str(refused.exception)
