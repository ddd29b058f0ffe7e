"""The synthetic caches of these tests are vLLM's: its own functions and kernels are asked.

Runs vLLM's interpreter, named by KVXFERD_VLLM_PYTHON.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from docs.tools.vllm_tables import QUANT_MODES
from kvxferd.ids import EngineId
from kvxferd.integrations.vllm.identity import start_generation
from kvxferd.integrations.vllm.layout import support
from kvxferd.integrations.vllm.layout.facts import AttentionFacts, CacheGroup, CacheKind, StateFacts
from kvxferd.integrations.vllm.session.request_params import ref_from_params
from kvxferd.layout.presets import LayerKind, ModelFacts, deploy
from kvxferd.layout.presets.model_facts import key_and_value
from kvxferd.plan import TransferTopology
from tests.support.connector_harness import BLOCK_TOKENS, EngineUnderTest, engines_on
from tests.support.documented_commands import commands_of
from tests.support.fetched_engine import register
from tests.support.nodes.daemon import Daemon
from tests.support.nodes.fleet import Fleet
from tests.support.repository import ROOT
from tests.support.vllm_kernels import NUM_STATES
from tests.support.vllm_pages import CPU, FLASH, Cache, Family, How, PagedEngine, PlacedCache

PYTHON = os.environ.get("KVXFERD_VLLM_PYTHON")
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]
PAGES = sorted((ROOT / "docs" / "how-to").glob("*.md"))
NUM_LAYERS, NUM_BLOCKS, NUM_HEADS, HEAD_SIZE = 3, 4, 2, 32
FACTS = AttentionFacts(NUM_HEADS, HEAD_SIZE, HEAD_SIZE, "bfloat16", 2)


@pytest.fixture
def daemon(fleet: Fleet) -> Daemon:
    return fleet.daemon("node")


@pytest.fixture
def engine(daemon: Daemon) -> Iterator[Callable[..., EngineUnderTest]]:
    """Make engines on the daemon."""
    with engines_on(daemon) as make:
        yield make


def send_request(*arguments: str, program: str = "vllm_introspection.py") -> Any:
    assert PYTHON is not None
    script, environ = ROOT / "tests" / "support" / program, os.environ | {"PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [PYTHON, script, *arguments], capture_output=True, text=True, check=False, env=environ
    )
    (reply,) = [line for line in ran.stdout.splitlines() if line.startswith("ANSWER ")] or [ran.stderr]
    return json.loads(reply.removeprefix("ANSWER "))


def test_tensors_have_the_shapes_and_strides_of_ours() -> None:
    found = send_request("views")
    assert len(found) == 8
    caches = tuple(Cache(f"layers.{layer}", 0, FLASH, FACTS) for layer in range(NUM_LAYERS))
    family = Family("", caches, (CacheGroup(0, CacheKind.FULL, 32),), NUM_HEADS, NUM_LAYERS)
    for name, made in found.items():
        layout, kernel = name.split("/")
        how = How(layout=layout, kernel_blocks=32 // int(kernel), num_blocks=NUM_BLOCKS)
        (rank,) = PagedEngine(family, how).ranks.values()
        ours = [placed.tensor(rank.memory, NUM_BLOCKS) for placed in rank.placed]
        assert made == [[list(v.shape), list(v.stride()), v.storage_offset()] for v in ours], name


@pytest.mark.parametrize("block_tokens", [32, 64])
@pytest.mark.parametrize("isa", ["vec", "vec16", "amx"])
def test_its_kernel_packs_a_block_as_our_reference_does(isa: str, block_tokens: int) -> None:
    found = send_request("packing", isa, str(block_tokens))
    if "missing" in found:
        pytest.skip(found["missing"])
    tokens, head = found["tokens"], block_tokens * FACTS.content_bytes
    numbers = np.arange(2 * tokens * NUM_HEADS * HEAD_SIZE) % 30000 + 1
    numbers = numbers.astype(np.int16).reshape(2, tokens, NUM_HEADS, HEAD_SIZE)
    strides = head, FACTS.content_bytes
    page = PlacedCache(
        Cache("", 0, CPU, FACTS, isa=isa), FACTS, 0, NUM_HEADS * head, strides, block_tokens, 1
    )
    memory = np.zeros(NUM_BLOCKS * NUM_HEADS * head, np.uint8)
    for token, slot in itertools.product(range(tokens), range(NUM_HEADS)):
        content = numbers[:, token, slot].ravel().view(np.uint8)
        for start, size in page.ranges([2, 1][token // block_tokens], slot, token % block_tokens):
            memory[start : start + size] = content[:size]
            content = content[size:]
    assert memory.view(np.int16).tolist() == found["cache"]


def test_its_specs_are_read_as_the_stand_ins_are() -> None:
    *found, full, sliding, state, latent = send_request("groups")
    assert found == [
        ["full", 32, None, 0, False],
        ["sliding", 32, 1025, 0, False],
        ["state", 512, None, 2, True],
        ["full", 32, None, 0, False],
    ]
    assert full == sliding == repr(AttentionFacts(2, 64, 64, "bfloat16", 2))
    assert latent == repr(AttentionFacts(1, 576, 0, "bfloat16", 2))
    shapes = ((3, 576), (16, 32, 16))
    dtypes = (("bfloat16", 2), ("float32", 4))
    assert state == repr(StateFacts("gdn_attn", shapes, dtypes, num_groups=4))


V4 = {
    *(f"0.{name}" for name in ("indexer.k", "indexer.scale", "compressor.indexer.compressor.state_cache")),
    *(
        f"{layer}.{name}"
        for layer in range(2)
        for name in ("latent", "latent.scale", "window", "window.scale", "compressor")
    ),
}
KEYS_AND_VALUES = {"0.k", "0.v"}
# Family, tensor parallelism, block size and order of axes of the sink and of the source, and what moves.
PACKED_PAIRS = {
    "deepseek-v4:2,256,BLHNC:1,512,BLNHC": V4,
    "glm:4,128,BLHNC:1,256,BLHNC": {"0.latent", "0.indexer.k", "0.indexer.scale", "0.ring"},
    "qwen:2,128,BLNHC:1,64,BLHNC": KEYS_AND_VALUES | {"0.indexer.k", "0.ring"},
    "minimax:4,128,BLHNC:2,256,BLNHC": KEYS_AND_VALUES | {"0.indexer.k"},
    "token-scales:4,32,LBNHC:2,16,LBHNC": KEYS_AND_VALUES,
}


def test_pages_that_its_planner_packs_move_whole_and_alone() -> None:
    """Specs of its own layers in blocks of its own planner, byte by byte through its own views."""
    found = send_request(*PACKED_PAIRS, program="vllm_real_pages.py")
    if "missing" in found:
        pytest.skip(found["missing"])
    assert {pair: set(one["moved"]) for pair, one in found.items()} == PACKED_PAIRS
    assert [(pair, one["wrong"], one["opaque"]) for pair, one in found.items() if one["wrong"]] == []
    assert not any(one["opaque"] for one in found.values())


# The bytes of what a page holds apart, by record; none: each record lies together.
RECORDS = {
    "584": (576, 8),
    "584 compressed": (576, 8),
    "528": (),
    "288": (),
    "132": (128, 4),
    "132 mx": (128, 4),
    "68": (64, 4),
}


def test_its_kernels_store_records_where_the_pages_of_our_tests_have_them(tmp_path: Path) -> None:
    """Their own text in Triton's interpreter. A byte may be stored as it was before, and few are."""
    found = send_request(str(tmp_path), program="vllm_kernels.py")
    if "missing" in found:
        pytest.skip(found["missing"])
    assert found.keys() == RECORDS.keys()
    for name, parts in RECORDS.items():
        size = int(name.split()[0])
        facts = AttentionFacts(1, size, 0, "uint8", 1)
        cache = Cache("", 0, "", facts, parts)
        page = PlacedCache(cache, facts, 0, 0, (NUM_STATES * size, size), NUM_STATES, 1)
        for state, changed in enumerate(found[name]):
            pieces = [set(range(at, at + length)) for at, length in page.ranges(0, 0, state)]
            assert set(changed) <= set().union(*pieces), name
            assert all(len(piece & set(changed)) > 0.9 * len(piece) for piece in pieces), name


PAIRS = [(1, 1), (2, 2), (1, 2), (1, 8), (2, 4), (2, 1), (4, 1), (8, 2), (8, 8)]


def test_its_planning_code_reads_the_ranks_that_ours_reads() -> None:
    """For attention without replicas: of several that hold the same, each chooses in its own way."""
    found = send_request("topology", *(f"{tp},{remote_tp}" for tp, remote_tp in PAIRS))
    assert len(found) == len(PAIRS)
    facts = ModelFacts("dense", 8, (LayerKind.FULL,), key_and_value(8, 4))
    for (tp, remote_tp), (ratio, targets) in zip(PAIRS, found, strict=True):
        deployment = {"num_blocks": 8, "block_tokens": 16}
        remote = deploy(facts, tp=remote_tp, engine_id="remote", **deployment)
        for rank, (spec, layout) in deploy(facts, tp=tp, engine_id="local", **deployment).items():
            ours = TransferTopology(spec, layout)
            register(ours, remote)
            assert ours.tp_ratio(remote_tp) == ratio
            assert ours.target_remote_ranks(EngineId("remote")) == targets[rank.tp_rank]


def test_its_base_class_calls_what_the_connector_defines() -> None:
    found = send_request("hooks")
    assert not found["abstract"]
    # vLLM 0.32 reports sleep to its backend alone.
    assert set(found["unknown"]) <= {"unregister_kv_caches", "restore_kv_caches"}
    assert found["unknown"] == [] or found["version"].startswith("0.32.")
    assert found["differing"] == []


def test_its_cache_gets_the_layout_that_the_connector_prefers_where_the_backend_takes_it() -> None:
    assert send_request("layouts") == {
        "by itself": "LBNHC",
        "auto": "LBHNC",
        "auto, latents": "LBNHC",
        "named": "BLHNC",
        "named, one other taken": "LBHNC",
        "beside another": "LBHNC",
        "beside one that asks": "KV cache layout mismatch",
        "engine, beside one that asks": "LBNHC",
    }


def test_its_server_understands_what_the_connector_counts_alone_and_as_one_of_several() -> None:
    """Where it does not, the server ends with the first transfer."""
    said = send_request("statistics")
    for line, num_pulls, num_failed in said.values():
        assert "Num pulls=4" in line.replace("': ", "=")  # several are a dict
        assert (num_pulls, num_failed) == (4, 4)
    assert said.keys() == {"alone", "child"}


def test_its_last_token_finds_all_of_its_window_whatever_the_prompts_length() -> None:
    """Of a prompt pulled to its end, one length in sixteen has no block for the oldest token."""
    assert send_request("windows") == {}


OTHERS_SENT = ["OwnHandshake"] * 2


@pytest.mark.parametrize(
    ("children", "sent"),
    [
        ("ours", []),
        ("ours,handshaking", OTHERS_SENT),
        ("handshaking,ours", OTHERS_SENT),
        ("ours,example", []),
        ("example,ours", []),
    ],
)
def test_two_stages_and_the_first_request_are_published_at_each_position_of_multi_connector(
    engine: Callable[..., EngineUnderTest], daemon: Daemon, children: str, sent: list[str]
) -> None:
    generation = str(start_generation(SimpleNamespace(instance_id="1732")))
    engine("prefill", generation=generation)
    found = send_request("handshake", daemon.worker_socket, "prefill", "1732", str(BLOCK_TOKENS), children)
    assert found["sent"] == sent
    assert ref_from_params(found["first"]).generation == generation
    handshakes = [ranks for ranks in found["siblings"] if ranks is not None]
    assert handshakes == [[[0, 0], [1, 0]]] * children.count("handshaking")


def test_the_tables_of_what_is_supported_have_each_name_of_its() -> None:
    found = send_request("names")
    assert set(found["caches"]) - {"AttentionSpec"} == {*support.CACHES, support.UNIFORM_SPEC}
    assert set(found["quantisation"]) >= set(QUANT_MODES)
    assert set(support.PARALLEL_SIZES) <= set(found["parallel"])


def test_the_documents_name_flags_and_fields_of_its() -> None:
    found = send_request("flags")
    if "missing" in found:
        pytest.skip(found["missing"])
    flags, fields = set(found), set(send_request("names")["transfer"])
    served = [c for page in PAGES for c in commands_of(page) if c.program == "vllm" and c.words[1] == "serve"]
    assert served
    for command in served:
        assert {word for word in command.words if word.startswith("--")} <= flags
        config = command.words[command.words.index("--kv-transfer-config") + 1]
        assert set(json.loads(config)) <= fields
