"""Asks vLLM itself, in its own interpreter, what it makes; prints JSON. See `test_real_vllm.py`.

python vllm_introspection.py FUNCTION ARGUMENT...
"""

from __future__ import annotations

import json
import sys

import torch

NUM_LAYERS, NUM_BLOCKS, NUM_HEADS, HEAD_SIZE = 3, 4, 2, 32


def views() -> dict[str, object]:
    """Shape, strides and offset of every layer's tensor, in every layout, whole and in kernel blocks."""
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheTensor,
        compute_layout_strides,
        create_kv_cache_views,
    )
    from vllm.v1.kv_cache_layout import KVCacheLayout

    spec = FullAttentionSpec(block_size=32, num_kv_heads=NUM_HEADS, head_size=HEAD_SIZE, dtype=torch.bfloat16)
    page = spec.page_size_bytes
    names = [f"layer.{number}" for number in range(NUM_LAYERS)]
    found: dict[str, object] = {}
    for layout in KVCacheLayout:
        for kernel in (32, 16):
            if kernel < 32 and layout.name not in ("LBHNC", "LBNHC"):
                continue  # vLLM splits only dense pages
            layer_stride, block_stride, *_ = compute_layout_strides(spec, NUM_BLOCKS, NUM_LAYERS, layout)
            raw = torch.zeros(page * NUM_BLOCKS * NUM_LAYERS, dtype=torch.int8)
            placed = KVCacheTensor(raw.nbytes, names, layer_stride, block_stride)
            made = create_kv_cache_views(raw, spec, NUM_BLOCKS, layout, placed, kernel)
            found[f"{layout.name}/{kernel}"] = [
                [list(view.shape), list(view.stride()), view.storage_offset()] for view in made
            ]
    return found


def packing(isa: str, block_size: str) -> dict[str, object]:
    """The bytes of a cache after vLLM's own kernel wrote known keys and values into two of its blocks."""
    from vllm import _custom_ops as ops

    block_tokens = int(block_size)
    if not hasattr(torch.ops._C, "cpu_attn_reshape_and_cache"):
        return {"missing": "this vLLM was not built for CPUs"}
    tokens = block_tokens + block_tokens // 2 + 1
    numbers = torch.arange(2 * tokens * NUM_HEADS * HEAD_SIZE, dtype=torch.int32)
    numbers = numbers.view(2, tokens, NUM_HEADS, HEAD_SIZE)
    bits = (numbers % 30000 + 1).to(torch.int16)  # no bit pattern of these is NaN in bfloat16
    key, value = bits.view(torch.bfloat16).unbind(0)
    cache = torch.zeros(NUM_BLOCKS, NUM_HEADS, block_tokens, 2 * HEAD_SIZE, dtype=torch.bfloat16)
    halves = cache.view(NUM_BLOCKS, NUM_HEADS, 2 * block_tokens, HEAD_SIZE)
    key_cache, value_cache = halves.chunk(2, dim=2)
    ids = torch.tensor([2, 1])
    at = torch.arange(tokens)
    slots = ids[at // block_tokens] * block_tokens + at % block_tokens
    scales = {"k_scale": 1.0, "v_scale": 1.0, "kv_cache_dtype": "auto"}
    content = (key.contiguous(), value.contiguous())
    ops.cpu_attn_reshape_and_cache(*content, key_cache, value_cache, slots, isa, **scales)
    return {"tokens": tokens, "cache": cache.view(torch.int16).flatten().tolist()}


def topology(*pairs: str) -> list[list[object]]:
    """Its planning code on pairs TP,REMOTE_TP: the ratio, and the ranks that each rank reads."""
    from vllm.distributed.kv_transfer.kv_connector.utils import EngineTransferInfo, TransferTopology

    found: list[list[object]] = []
    dense = {"is_mla": False, "is_mamba": False, "total_num_kv_heads": 8, "attn_backends": []}
    for tp, remote_tp in (map(int, pair.split(",")) for pair in pairs):
        targets, ratio = [], 0
        for rank in range(tp):
            made = TransferTopology(tp_rank=rank, tp_size=tp, block_size=16, engine_id="local", **dense)
            made.register_remote_engine("remote", EngineTransferInfo(remote_tp, 4096, 16, 1))
            assert made.handshake_target_ranks(remote_tp) == made.target_remote_ranks("remote")
            targets.append(made.target_remote_ranks("remote"))
            ratio = made.tp_ratio(remote_tp)
        found.append([ratio, targets])
    return found


def hooks() -> dict[str, object]:
    """What the connector defines that its base class does not, or with other parameters."""
    import inspect

    from vllm import __version__
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

    from kvxferd.integrations.vllm import KvxferdConnector

    own = {name: item for name, item in vars(KvxferdConnector).items() if not name.startswith("_")}
    bases = (KVConnectorBase_V1, SupportsHMA)
    theirs = {name: getattr(base, name) for base in bases for name in own if hasattr(base, name)}
    differing = [
        name
        for name, item in theirs.items()
        if inspect.isfunction(item)
        and list(inspect.signature(item).parameters) != list(inspect.signature(own[name]).parameters)
    ]
    return {
        "version": __version__,
        "abstract": sorted(KvxferdConnector.__abstractmethods__),
        "unknown": sorted(own.keys() - theirs.keys()),
        "differing": differing,
    }


def layouts() -> dict[str, str]:
    """What it resolves with the connector, alone or beside another, where backends take any layout or one."""
    from types import SimpleNamespace

    from vllm.config import KVTransferConfig
    from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
    from vllm.v1.kv_cache_layout import KVCacheLayout

    def resolved(connector: dict[str, object], supported: list[str], *, use_mla: bool = False) -> str:
        config = SimpleNamespace(
            cache_config=SimpleNamespace(kv_cache_layout=None),
            model_config=SimpleNamespace(use_mla=use_mla),
            kv_transfer_config=KVTransferConfig(**connector),
        )
        return str(resolve_kv_cache_layout(config, [supported]).name)

    any_layout = ["LBNHC", *(layout.name for layout in KVCacheLayout if layout.name != "LBNHC")]
    named = OURS | {"kv_connector_extra_config": {"kv_cache_layout": "BLHNC"}}
    beside = SEVERAL | {"kv_connector_extra_config": {"connectors": [OURS, EXAMPLE]}}
    silent = OURS | {"kv_connector_extra_config": {"kv_cache_layout": "engine"}}
    asks_for_tokens_first = {"kv_connector": "ExampleHiddenStatesConnector", "kv_role": "kv_both"}
    beside_one_that_asks = [
        SEVERAL | {"kv_connector_extra_config": {"connectors": [ours, asks_for_tokens_first]}}
        for ours in (OURS, silent)
    ]
    try:
        mismatch = resolved(beside_one_that_asks[0], any_layout)
    except ValueError as error:
        mismatch = str(error).partition(":")[0]
    return {
        "by itself": resolved(EXAMPLE, any_layout),
        "auto": resolved(OURS, any_layout),
        "auto, latents": resolved(OURS, any_layout, use_mla=True),
        "named": resolved(named, any_layout),
        "named, one other taken": resolved(named, ["LBHNC"]),
        "beside another": resolved(beside, any_layout),
        "beside one that asks": mismatch,
        "engine, beside one that asks": resolved(beside_one_that_asks[1], ["LBHNC", "LBNHC"]),
    }


def groups() -> list[object]:
    """What is read of its own specs, one of a kind."""
    from types import SimpleNamespace

    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        MambaSpec,
        MLAAttentionSpec,
        SlidingWindowSpec,
        UniformTypeKVCacheSpecs,
    )

    from kvxferd.integrations.vllm.layout.specs import read_groups, read_layers

    sizes = {"block_size": 32, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}
    latent = MLAAttentionSpec(**sizes | {"num_kv_heads": 1, "head_size": 576})
    state = MambaSpec(
        block_size=512,
        shapes=((3, 576), (16, 32, 16)),
        dtypes=(torch.bfloat16, torch.float32),
        mamba_type=MambaAttentionBackendEnum.GDN_ATTN,
        mamba_cache_mode="align",
        num_speculative_blocks=2,
    )
    specs = {
        "model.layers.0.attn": FullAttentionSpec(**sizes),
        "model.layers.1.attn": SlidingWindowSpec(**sizes, sliding_window=1024, extra_retained_tokens=2),
        "model.layers.2.mixer": state,
        "model.layers.3.attn": UniformTypeKVCacheSpecs(32, kv_cache_specs={"model.layers.3.attn": latent}),
    }
    made = KVCacheConfig(10, [], [KVCacheGroupSpec([name], spec) for name, spec in specs.items()])
    parallel = SimpleNamespace(prefill_context_parallel_size=1, decode_context_parallel_size=1)
    config = SimpleNamespace(
        parallel_config=parallel,
        cache_config=SimpleNamespace(cache_dtype="auto"),
        compilation_config=SimpleNamespace(static_forward_context={}),
        model_config=SimpleNamespace(hf_text_config=SimpleNamespace(n_groups=4)),
    )
    layers = read_layers(made, config, is_conv_dim_first=False, fp8_dtype="float8_e4m3fn")
    return [
        [g.kind.value, g.block_tokens, g.kept_tokens, g.speculative_blocks, g.state_by_position]
        for g in read_groups(made, config)
    ] + [repr(layer.cache) for layer in layers]


def windows() -> dict[int, list[str]]:
    """What its block pool makes of pulls of many lengths: which blocks of the last token's window lack.

    By prompt length, in vLLM's list for the request and in what a prefill engine can publish of its own.
    """
    from types import SimpleNamespace

    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        SlidingWindowSpec,
    )
    from vllm.v1.request import Request

    from kvxferd.integrations.vllm.layout.groups import CacheGroups

    init_none_hash(sha256)
    window, block = 40, 16
    sizes = {"block_size": block, "num_kv_heads": 1, "head_size": 16, "dtype": torch.bfloat16}
    specs = FullAttentionSpec(**sizes), SlidingWindowSpec(**sizes, sliding_window=window)
    made = KVCacheConfig(200, [], [KVCacheGroupSpec([str(spec)], spec) for spec in specs])
    parallel = SimpleNamespace(prefill_context_parallel_size=1, decode_context_parallel_size=1)
    groups = CacheGroups.from_vllm(
        SimpleNamespace(parallel_config=parallel, num_prefill_lookahead_tokens=0), made
    )
    lacking: dict[int, list[str]] = {}
    for length in range(window, 3 * window):
        pulled = groups.prefill_tokens(length)
        first = (length - window) // block  # of the blocks that the last token looks at
        for what, tokens in (("pulled", {"num_external_computed_tokens": pulled}), ("published", {})):
            pool = KVCacheManager(made, 4096, block, block)
            hasher = get_request_block_hasher(block, sha256)
            prompt = list(range(length if tokens else pulled))
            request = Request(what, prompt, SamplingParams(max_tokens=1), None, block_hasher=hasher)
            pool.allocate_slots(request, 0 if tokens else pulled, delay_cache_blocks=True, **tokens)
            pool.remove_skipped_blocks(what, pulled, num_prompt_tokens=len(prompt))
            listed = pool.get_block_ids(what)
            if 0 in listed[1][first:]:
                lacking.setdefault(length, []).append(what)
            groups.select_blocks(listed, pulled)
    return lacking


def statistics() -> dict[str, object]:
    """What its server's process says of two workers' and a scheduler's figures: log line and metrics."""
    return {"alone": _said_of(OURS, wraps=False), "child": _said_of(SEVERAL, wraps=True)}


OURS = {
    "kv_connector": "KvxferdConnector",
    "kv_connector_module_path": "kvxferd.integrations.vllm",
    "kv_role": "kv_both",
}
SEVERAL = {
    "kv_connector": "MultiConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"connectors": [OURS]},
}


def _said_of(connector: dict[str, object], *, wraps: bool) -> list[object]:
    from types import SimpleNamespace

    import msgspec
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging, KVConnectorProm
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorStats

    registry = CollectorRegistry()

    class Prom(KVConnectorProm):
        _gauge_cls, _counter_cls, _histogram_cls = (
            staticmethod(lambda *given, kind=kind, **named: kind(*given, registry=registry, **named))
            for kind in (Gauge, Counter, Histogram)
        )

    config = KVTransferConfig(**connector)
    log = KVConnectorLogging(config)
    prom = Prom(SimpleNamespace(kv_transfer_config=config), ["engine"], {0: ["0"]})

    from kvxferd.errors import Code
    from kvxferd.integrations.vllm.metrics import KvxferdStats
    from kvxferd.integrations.vllm.session.stats import ConnectorStats

    total = None
    for pull_s in (0.1, 0.2):
        tally = ConnectorStats()
        tally.record_pull(pull_s, 0.05, 1 << 20, 3)
        tally.record_failed_pull(Code.RELEASED)
        own = KvxferdStats(tally.collect())
        one = MultiKVConnectorStats(data={"KvxferdConnector": own}) if wraps else own
        total = one if total is None else total.aggregate(one)
    assert total is not None
    travelled = msgspec.msgpack.decode(msgspec.msgpack.encode(total.to_dict()))
    lines: list[object] = []
    for _ in range(2):  # two steps within one interval of the log
        log.observe(travelled)
        prom.observe(travelled)
    log.log(lambda words, *values: lines.append(words % values))
    labels = {"engine": "0", "code": Code.RELEASED.value}
    return [
        *lines,
        registry.get_sample_value("vllm:kvxferd_pull_seconds_count", {"engine": "0"}),
        registry.get_sample_value("vllm:kvxferd_pulls_failed_total", labels),
    ]


def names() -> dict[str, list[str]]:
    """The names of what an engine may have: caches, quantisation modes, sizes, fields of a transfer."""
    import dataclasses

    from vllm.config import KVTransferConfig, ParallelConfig
    from vllm.v1 import kv_cache_interface

    specs = [found for found in vars(kv_cache_interface).values() if isinstance(found, type)]
    base = kv_cache_interface.KVCacheSpec
    return {
        "caches": [spec.__name__ for spec in specs if issubclass(spec, base) and spec is not base],
        "quantisation": [mode.name for mode in kv_cache_interface.KVQuantMode],
        "parallel": [field.name for field in dataclasses.fields(ParallelConfig)],
        "transfer": [field.name for field in dataclasses.fields(KVTransferConfig)],
    }


def flags() -> list[str] | dict[str, object]:
    """The flags of `vllm serve`."""
    from vllm.platforms import current_platform

    if not current_platform.device_type:
        return {"missing": "this vLLM finds no device that it was built for"}
    try:
        from vllm.entrypoints.common.cli_args import make_arg_parser
    except ModuleNotFoundError:  # 0.32
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())
    return [flag for action in parser._actions for flag in action.option_strings]


EXAMPLE = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
HANDSHAKING = {
    "kv_connector": "HandshakingConnector",
    "kv_connector_module_path": "tests.support.vllm_servers.handshaking_connector",
    "kv_role": "kv_both",
}


def handshake(
    socket_path: str, engine_id: str, start: str, block_size: str, children: str
) -> dict[str, object]:
    """What its MultiConnector, or ours alone, makes of two stages' handshakes and of the first request.

    The ranks are registered at `socket_path` by the caller. `start` is vLLM's name of the start. `children`
    are `ours`, `handshaking` and `example`, by commas; one alone is not wrapped.
    """
    from types import SimpleNamespace

    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer import kv_transfer_state
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    block_tokens = int(block_size)
    known = {
        "ours": OURS | {"kv_connector_extra_config": {"socket": socket_path}},
        "handshaking": HANDSHAKING,
        "example": EXAMPLE,
    }
    connectors = [known[child] for child in children.split(",")]
    several = SEVERAL | {"kv_connector_extra_config": {"connectors": connectors}}
    chosen = connectors[0] if len(connectors) == 1 else several
    config = SimpleNamespace(
        kv_transfer_config=KVTransferConfig(**chosen, engine_id=engine_id),
        instance_id=start,
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=True),
        cache_config=SimpleNamespace(block_size=block_tokens),
        parallel_config=SimpleNamespace(prefill_context_parallel_size=1, decode_context_parallel_size=1),
    )
    sizes = {"num_kv_heads": 1, "head_size": 16, "dtype": torch.bfloat16}
    spec = FullAttentionSpec(block_size=block_tokens, **sizes)
    caches = KVCacheConfig(32, [], [KVCacheGroupSpec(["model.layers.0.attn"], spec)])

    content: dict[tuple[int, int], object] = {}
    for stage in range(2):
        worker = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, caches)
        kv_transfer_state._KV_CONNECTOR_AGENT = worker
        if (sent := worker.get_handshake_metadata()) is not None:
            content[stage, 0] = sent
    scheduler = KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, caches)
    scheduler.set_xfer_handshake_metadata_pp_aware(content)

    request = SimpleNamespace(
        request_id="first",
        num_prompt_tokens=2 * block_tokens,
        num_computed_tokens=2 * block_tokens,
        kv_transfer_params={"do_remote_decode": True, "do_remote_prefill": False},
        status=SimpleNamespace(name="FINISHED_LENGTH_CAPPED"),
        prompt_token_ids=None,
        max_tokens=1,
    )
    scheduler.on_new_request(request)
    keeps, params = scheduler.request_finished_all_groups(request, ([1, 2],))
    siblings = [getattr(one, "ranks", None) for one in getattr(scheduler, "sub_connectors", [])]
    scheduler.shutdown()
    return {
        "sent": [type(one).__name__ for one in content.values()],
        "first": params if keeps else None,
        "siblings": siblings,
    }


if __name__ == "__main__":
    what, *rest = sys.argv[1:]
    print("ANSWER " + json.dumps(globals()[what](*rest)))
