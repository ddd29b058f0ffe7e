"""What a node's history tells of one request, on both nodes, and of who did not reply."""

from __future__ import annotations

import time

import pytest

from kvxferd.mover.ucx_settings import tls_with_cuda
from tests.support.nodes.fleet import Fleet
from tests.support.nodes.processes import stopped
from tests.support.nodes.requests import TOKENS, ids_for, publish, pull_and_check
from tests.support.nodes.waiting import wait_until

DEADLINE_S = 2.0
TCP = {"UCX_TLS": tls_with_cuda("tcp")}


@pytest.mark.timeout(120)
def test_a_request_is_followed_on_both_nodes_and_a_deadline_names_who_did_not_reply(fleet: Fleet):
    started = time.time()
    there, here = fleet.shared("p", **TCP), fleet.shared("d", **TCP)
    source, sink = fleet.pair(there, here)
    ref = publish([source], 1)
    pull_and_check([sink], ref, 1)
    (pulled,) = here.history(transfer=ref["transfer_id"], kind="pull")
    (released,) = there.history(transfer=ref["transfer_id"])
    assert pulled["peer"] == there.endpoint
    assert [reader["peers"] for reader in released["readers"]] == [[here.endpoint]]
    assert released["bytes"] == pulled["bytes"] > 0
    for record in (pulled, released):
        assert started - 1 < record["started_at"] <= record["ended_at"] < time.time() + 1

    # The source's mover stops while it is read: the reader's mover says whose reads are in flight. Who else
    # is named: `unit/core/sink/test_pull_records`.
    ref = publish([source], 2)
    sink.prepare(ref)
    wait_until(
        lambda: here.status()["num_grants_held"], "granted: a stopped mover could not reply that it polls"
    )
    with stopped(there.movers_of(source.memory_inode())):
        name, fields = sink.end_of(sink.pull(ref, ids_for(0, 16), TOKENS, DEADLINE_S))
        assert (name, fields["code"]) == ("Failed", "deadline")
        (end,) = here.history(failed="true", kind="pull")
    assert end["transfer_id"] == ref["transfer_id"]
    assert end["silent"] == "rank pp0.tp0 of engine prefill"
    assert end["failed_phase"] in ("wire", "fence")
    assert end["silent"] in end["message"]
