"""Two builds of neighbouring protocol versions: a cluster, and a node, whose upgrade is half done."""

from __future__ import annotations

import pytest

from kvxferd.errors import Code
from kvxferd.tooling.child_process import ChildError
from kvxferd.wire.peer import PEER_VERSIONS
from kvxferd.wire.worker import WORKER_VERSIONS
from tests.support.next_build import become_next
from tests.support.nodes.daemon import Daemon
from tests.support.nodes.fleet import Fleet
from tests.support.nodes.rank_process import RankProcess
from tests.support.nodes.requests import TOKENS, ids_for, publish, spec_of

NEXT = PEER_VERSIONS.newest + 1


@pytest.fixture
def next_daemon(fleet: Fleet) -> Daemon:
    """A daemon of the next build."""
    return fleet.daemon("next", module="tests.support.next_build")


def next_rank(fleet: Fleet) -> RankProcess:
    rank = fleet.rank()
    rank.run(become_next)
    return rank


def refused(sink: RankProcess, ref: dict[str, object]) -> str:
    """Return why a pull failed for its version. It did so before anything was written."""
    name, fields = sink.end_of(sink.pull(ref, ids_for(9), TOKENS))
    assert (name, fields.get("code"), fields.get("safe_to_reuse")) == ("Failed", Code.BAD_VERSION, True)
    return fields["message"]


def test_daemons_of_neighbouring_builds_refuse_each_other_and_what_runs_goes_on(
    fleet: Fleet, next_daemon: Daemon
) -> None:
    old = fleet.daemon("old")
    sources = fleet.engine(old, spec_of("prefill", tp_size=2))
    (sink,) = fleet.engine(fleet.daemon("old-decode"), spec_of("decode"))
    ids = ids_for(1)
    for source in sources:
        source.write(1, ids, TOKENS)
    ref = sources[0].publish("req-1", ids, TOKENS)
    running = sink.pull(ref, ids, TOKENS, deadline_s=120.0)  # it waits for the second rank

    upgraded = fleet.register(next_daemon, spec_of("upgraded"), rank=next_rank(fleet))
    why = refused(upgraded, ref)
    assert f"version {NEXT}: this one speaks {PEER_VERSIONS}; upgrade the older" in why
    why = refused(sink, publish([upgraded], 2))
    assert f"version {PEER_VERSIONS}: this one speaks {NEXT}; upgrade the older" in why

    sources[1].ready("req-1")
    name, fields = sink.end_of(running)
    assert name == "Delivered", fields
    assert sink.num_wrong(1, ids, TOKENS) == 0


def test_an_engine_and_a_daemon_of_neighbouring_builds_refuse_each_other(
    fleet: Fleet, next_daemon: Daemon
) -> None:
    old = fleet.shared("old")
    for daemon, rank, theirs, ours in (
        (next_daemon, fleet.rank(), WORKER_VERSIONS, NEXT),
        (old, next_rank(fleet), NEXT, WORKER_VERSIONS),
    ):
        with pytest.raises(ChildError) as raised:
            fleet.register(daemon, spec_of("engine"), rank=rank)
        assert raised.value.code is Code.BAD_VERSION
        assert f"version {theirs}: this one speaks {ours}; upgrade the older" in raised.value.message
