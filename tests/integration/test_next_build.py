"""Two builds of neighbouring protocol versions: a cluster whose upgrade is half done."""

from __future__ import annotations

from kvxferd.errors import Code
from kvxferd.wire.peer import PEER_VERSIONS
from tests.support.next_build import become_next
from tests.support.nodes.fleet import Fleet
from tests.support.nodes.rank_process import RankProcess
from tests.support.nodes.requests import TOKENS, ids_for, publish, spec_of

NEXT = PEER_VERSIONS.newest + 1


def refused(sink: RankProcess, ref: dict[str, object]) -> str:
    """Return why a pull failed for its version. It did so before anything was written."""
    name, fields = sink.end_of(sink.pull(ref, ids_for(9), TOKENS))
    assert (name, fields.get("code"), fields.get("safe_to_reuse")) == ("Failed", Code.BAD_VERSION, True)
    return fields["message"]


def test_daemons_of_neighbouring_builds_refuse_each_other_and_what_runs_goes_on(fleet: Fleet) -> None:
    upgraded = fleet.rank()
    upgraded.run(become_next)
    next_daemon = fleet.daemon("next", module="tests.support.next_build")
    fleet.register(next_daemon, spec_of("upgraded"), rank=upgraded)
    old = fleet.daemon("old")
    sources = fleet.engine(old, spec_of("prefill", tp_size=2))
    (sink,) = fleet.engine(fleet.daemon("old-decode"), spec_of("decode"))
    ids = ids_for(1)
    for source in sources:
        source.write(1, ids, TOKENS)
    ref = sources[0].publish("req-1", ids, TOKENS)
    running = sink.pull(ref, ids, TOKENS, deadline_s=120.0)  # it waits for the second rank

    why = refused(upgraded, ref)
    assert f"version {NEXT}: this one speaks {PEER_VERSIONS}; upgrade the older" in why
    why = refused(sink, publish([upgraded], 2))
    assert f"version {PEER_VERSIONS}: this one speaks {NEXT}; upgrade the older" in why

    sources[1].ready("req-1")
    name, fields = sink.end_of(running)
    assert name == "Delivered", fields
    assert sink.num_wrong(1, ids, TOKENS) == 0
