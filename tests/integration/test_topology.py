"""An operator's question to a real daemon: what do its ranks read of a remote engine?"""

from __future__ import annotations

import json

from kvxferd.layout import EngineSpec
from tests.support.nodes.fleet import Fleet
from tests.support.nodes.requests import publish, pull_and_check, spec_of

LAYERS, HEADS, HEAD_BYTES = 4, 8, 16 * 2
BYTES_PER_TOKEN = LAYERS * 2 * HEADS * HEAD_BYTES  # K and V


def test_the_operator_sees_what_each_rank_reads(fleet: Fleet) -> None:
    prefill, decode = fleet.shared("prefill"), fleet.shared("decode")
    sources = fleet.engine(prefill, spec_of("wide", tp_size=4))
    sinks = fleet.engine(decode, spec_of("narrow", tp_size=2))
    refused = decode.verb("engines", "--topology", "nobody")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.endswith("[engine-unknown]\n")

    pull_and_check(sinks, publish(sources, 1), 1)
    done = decode.verb("engines", "--topology", "wide", "--json")
    assert done.returncode == 0
    shown = json.loads(done.stdout)
    assert [topology["local_rank"] for topology in shown] == [[0, 0], [0, 1]]
    for rank, topology in enumerate(shown):
        assert (topology["engine_id"], topology["generation"]) == ("wide", fleet.generation())
        assert topology["home"] == prefill.endpoint
        assert topology["last_used_s"] >= 0
        (stage,) = topology["stages"]
        sources_of_rank = [2 * rank, 2 * rank + 1]
        assert (stage["tp_ratio"], stage["block_size_ratio"]) == (-2, 1)
        assert stage["handshake_target_ranks"] == stage["target_remote_ranks"] == sources_of_rank
        assert stage["info"]["remote_tp_size"] == 4
        assert (stage["info"]["start_layer"], stage["info"]["end_layer"]) == (0, LAYERS)
        assert len(stage["regions"]) == LAYERS * 2
        assert [split["remote_rank"] for split in stage["splits"]] == sources_of_rank
        assert [read["remote_rank"] for read in stage["reads"]] == sources_of_rank
        assert sum(read["bytes_per_token"] for read in stage["reads"]) == BYTES_PER_TOKEN / 2

    done = decode.verb("explain", "@wide", "@narrow", "--json")
    assert done.returncode == 0
    explained = {
        (tuple(rank["decode_rank"]), read["prefill_rank"][1]): read["bytes_per_1000_tokens"]
        for rank in json.loads(done.stdout)["ranks"]
        for read in rank["reads"]
    }
    assert explained == {
        (tuple(topology["local_rank"]), read["remote_rank"]): 1000 * read["bytes_per_token"]
        for topology in shown
        for read in topology["stages"][0]["reads"]
    }


def test_a_restarted_engine_replaces_what_was_known(fleet: Fleet) -> None:
    prefill, decode = fleet.shared("prefill"), fleet.shared("decode")
    (sink,) = fleet.engine(decode, spec_of("decode"))
    (source,) = fleet.engine(prefill, spec_of("restarted"))
    pull_and_check([sink], publish([source], 1), 1)
    source.close()
    again = EngineSpec("restarted", "g2", num_layers=4, num_kv_heads=8, tp_size=2)
    pull_and_check([sink], publish(fleet.engine(prefill, again), 2), 2)
    remote = decode.control.get("/v1/topology")["topology"]
    (topology,) = [one for one in remote if one["engine_id"] == "restarted"]
    assert topology["generation"] == fleet.generation("g2")
    assert topology["stages"][0]["target_remote_ranks"] == [0, 1]
