"""What a node's history tells of one request, on both nodes, and of who did not reply."""

from __future__ import annotations

import time
from typing import Any

import pytest

from kvxferd.mover.ucx_settings import tls_with_cuda
from tests.support.nodes.daemon import Daemon
from tests.support.nodes.fleet import Fleet
from tests.support.nodes.processes import stopped
from tests.support.nodes.rank_process import RankProcess
from tests.support.nodes.requests import TOKENS, ids_for, publish, pull_and_check, spec_of

DEADLINE_S = 2.0


@pytest.mark.timeout(120)
def test_a_request_is_followed_on_both_nodes_and_a_deadline_names_who_did_not_reply(fleet: Fleet):
    started = time.time()
    there, here = fleet.daemon("p", **TCP), fleet.daemon("d", **TCP)
    (source,), (sink,) = fleet.engine(there, spec_of("prefill")), fleet.engine(here, spec_of("decode"))
    ref = publish([source], 1)
    pull_and_check([sink], ref, 1)
    (pulled,) = here.history(transfer=ref["transfer_id"], kind="pull")
    (released,) = there.history(transfer=ref["transfer_id"])
    assert pulled["peer"] == there.endpoint
    assert [reader["peers"] for reader in released["readers"]] == [[here.endpoint]]
    assert released["bytes"] == pulled["bytes"] > 0
    for record in (pulled, released):
        assert started - 1 < record["started_at"] <= record["ended_at"] < time.time() + 1

    # The source's mover stops while it is read: the reader's mover says whose reads are in flight.
    ref = publish([source], 2)
    sink.prepare(ref)
    wait_for_grant(here)
    with stopped(there.movers_of(source.memory_inode())):
        end = failed_pull(here, sink, ref)
    assert end["silent"] == "rank pp0.tp0 of engine prefill"
    assert end["failed_phase"] in ("wire", "fence")
    assert end["silent"] in end["message"]

    # The reader's own mover stops.
    ref = publish([source], 3)
    with stopped(here.movers_of(sink.memory_inode())):
        end = failed_pull(here, sink, ref)
    assert end["silent"] == "the mover of rank pp0.tp0 of engine decode"

    # The source's daemon stops.
    ref = publish([source], 4)
    with stopped([there.pid]):
        end = failed_pull(here, sink, ref)
    assert end["silent"] == there.endpoint
    assert len(here.history(3, failed="true", kind="pull")) == 3


TCP = {"UCX_TLS": tls_with_cuda("tcp")}


def failed_pull(daemon: Daemon, sink: RankProcess, ref: dict[str, Any]) -> dict[str, Any]:
    """Pull until the deadline, and return the record."""
    ticket = sink.pull(ref, ids_for(0, 16), TOKENS, deadline_s=DEADLINE_S)
    name, fields = sink.end_of(ticket)
    assert (name, fields["code"]) == ("Failed", "deadline")
    return daemon.history(transfer=ref["transfer_id"], kind="pull")[-1]


def wait_for_grant(daemon: Daemon) -> None:
    """A stopped mover could not reply that it polls."""
    while not daemon.status()["num_grants_held"]:
        time.sleep(0.01)
