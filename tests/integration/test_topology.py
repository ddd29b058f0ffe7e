"""An operator's question to a real daemon: what do its ranks read of a remote engine?"""

from __future__ import annotations

import json

from tests.support.nodes.fleet import Fleet
from tests.support.nodes.requests import publish, pull_and_check, spec_of

LAYERS, HEADS, HEAD_BYTES = 4, 8, 16 * 2
BYTES_PER_TOKEN = LAYERS * 2 * HEADS * HEAD_BYTES  # K and V


def test_the_operator_sees_what_each_rank_reads(fleet: Fleet) -> None:
    prefill, decode = fleet.shared("prefill"), fleet.shared("decode")
    sources = fleet.engine(prefill, spec_of("wide", tp_size=4))
    sinks = fleet.engine(decode, spec_of("narrow", tp_size=2))
    pull_and_check(sinks, publish(sources, 1), 1)
    done = decode.verb("topology", "--json")
    assert done.returncode == 0
    shown = sorted(
        (terms for terms in json.loads(done.stdout) if terms["engine_id"] == "wide"),
        key=lambda terms: terms["local_rank"],
    )
    assert [terms["local_rank"] for terms in shown] == [[0, 0], [0, 1]]
    for rank, terms in enumerate(shown):
        assert (terms["engine_id"], terms["generation"]) == ("wide", fleet.generation())
        assert terms["home"] == prefill.endpoint
        assert terms["last_used_s"] >= 0
        assert (terms["tp_ratio"], terms["block_size_ratio"], terms["remote_tp_size"]) == (-2, 1, 4)
        assert terms["handshake_target_ranks"] == terms["target_remote_ranks"] == [2 * rank, 2 * rank + 1]
        assert (terms["start_layer"], terms["end_layer"]) == (0, LAYERS)

    done = decode.verb("explain", "@wide", "@narrow", "--json")
    assert done.returncode == 0
    explained = json.loads(done.stdout)["ranks"]
    assert [[read["source"][1] for read in rank["reads"]] for rank in explained] == [
        terms["target_remote_ranks"] for terms in shown
    ]
    assert [rank["num_bytes"] for rank in explained] == [1000 * BYTES_PER_TOKEN / 2] * 2
