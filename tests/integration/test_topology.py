"""An operator's question to a real daemon: what do its ranks read of a remote engine?"""

from __future__ import annotations

import json
import subprocess
import sys

from kvxferd.layout import EngineSpec
from tests.support.daemon_fleet import DaemonUnderTest, Fleet
from tests.support.rank_requests import publish, pull_and_check, spec_of

LAYERS, HEADS, HEAD_BYTES = 4, 8, 16 * 2
BYTES_PER_TOKEN = LAYERS * 2 * HEADS * HEAD_BYTES  # K and V


def kvxferd(daemon: DaemonUnderTest, *arguments: str) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "kvxferd.cli", *arguments, "--socket", daemon.control.socket_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    return done.returncode, done.stdout, done.stderr


def test_the_operator_sees_what_each_rank_reads(fleet: Fleet) -> None:
    prefill, decode = fleet.daemon("prefill"), fleet.daemon("decode")
    sources = fleet.engine(prefill, spec_of("prefill", tp_size=4))
    sinks = fleet.engine(decode, spec_of("decode", tp_size=2))
    assert kvxferd(decode, "engines", "--topology")[:2] == (0, "Remote engines: none\n")
    pull_and_check(sinks, publish(sources, 1), 1)
    code, out, _ = kvxferd(decode, "engines", "--topology", "--json")
    assert code == 0
    shown = sorted(json.loads(out), key=lambda terms: terms["local_rank"])
    (peer,) = decode.status()["peers"]
    assert [terms["local_rank"] for terms in shown] == [[0, 0], [0, 1]]
    for rank, terms in enumerate(shown):
        assert (terms["engine_id"], terms["generation"]) == ("prefill", "g1")
        assert terms["home"] == peer["endpoint"]
        assert terms["last_used_s"] >= 0
        assert (terms["tp_ratio"], terms["block_size_ratio"], terms["remote_tp_size"]) == (-2, 1, 4)
        assert terms["handshake_target_ranks"] == terms["target_remote_ranks"] == [2 * rank, 2 * rank + 1]
        assert (terms["start_layer"], terms["end_layer"]) == (0, LAYERS)

    code, out, _ = kvxferd(decode, "explain", "@prefill", "@decode", "--json")
    assert code == 0
    explained = json.loads(out)["ranks"]
    assert [[read["prefill_rank"][1] for read in rank["reads"]] for rank in explained] == [
        terms["target_remote_ranks"] for terms in shown
    ]
    assert [rank["bytes_per_1000_tokens"] for rank in explained] == [1000 * BYTES_PER_TOKEN / 2] * 2


def test_a_restarted_engine_replaces_what_was_known(fleet: Fleet) -> None:
    prefill, decode = fleet.daemon("prefill"), fleet.daemon("decode")
    (sink,) = fleet.engine(decode, spec_of("decode"))
    (source,) = fleet.engine(prefill, spec_of("prefill"))
    pull_and_check([sink], publish([source], 1), 1)
    source.stop()
    again = EngineSpec("prefill", "g2", num_layers=4, num_kv_heads=8, tp_size=2)
    pull_and_check([sink], publish(fleet.engine(prefill, again), 2), 2)
    (terms,) = decode.control.get("/v1/topology")["topology"]
    assert terms["generation"] == "g2"
    assert terms["target_remote_ranks"] == [0, 1]
