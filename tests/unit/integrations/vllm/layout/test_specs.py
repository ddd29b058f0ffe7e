"""What is read of vLLM's objects, on stand-ins.

`test_real_vllm.py` reads the real ones.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from kvxferd.errors import LayoutError
from kvxferd.integrations.vllm.layout.facts import AttentionFacts, CacheGroup, CacheKind, LayerFacts
from kvxferd.integrations.vllm.layout.groups import CacheGroups
from kvxferd.integrations.vllm.layout.specs import (
    device_name,
    fill_token_scales,
    implementation_of,
    plugin_cache_dtypes,
    read_device,
    read_groups,
    read_layers,
    read_worker,
)
from tests.support.vllm_specs import Layer, Mixer, QuantMode, mamba_spec, spec, vllm_config

FULL = spec("FullAttentionSpec")
SLIDING = spec("SlidingWindowSpec", sliding_window=1024, extra_retained_tokens=0, dcp_sharded=False)
MLA = spec("MLAAttentionSpec", num_kv_heads=1, head_size=576, head_size_v=0, cache_dtype_str="auto")
MAMBA = mamba_spec(
    Mixer.MAMBA2,
    ((3, 576), (16, 32, 16)),
    (torch.bfloat16, torch.float32),
    num_speculative_blocks=2,
)


def kv_cache_config(*specs: Any, take_part: tuple[int, ...] | None = None) -> Any:
    groups = [
        SimpleNamespace(kv_cache_spec=s, layer_names=[f"model.layers.{i}.attn"]) for i, s in enumerate(specs)
    ]
    ids = tuple(range(len(specs))) if take_part is None else take_part
    return SimpleNamespace(num_blocks=100, kv_cache_groups=groups, transfer_group_ids=ids)


def only_layer(one: Any, config: Any = None, *, is_conv_dim_first: bool = False, **more: Any) -> LayerFacts:
    """Return what is read of the only layer of an engine."""
    (layer,) = read_layers(
        kv_cache_config(one),
        config or vllm_config(),
        is_conv_dim_first=is_conv_dim_first,
        fp8_dtype="float8_e4m3fn",
        **more,
    )
    return layer


@pytest.mark.parametrize(
    ("one", "group"),
    [
        (
            spec("SlidingWindowSpec", sliding_window=32, extra_retained_tokens=3, dcp_sharded=False),
            CacheGroup(0, CacheKind.SLIDING, 16, kept_tokens=34),
        ),
        (MAMBA, CacheGroup(0, CacheKind.STATE, 512, speculative_blocks=2)),
        (
            spec("SlidingWindowMLASpec", sliding_window=128, extra_retained_tokens=0, bounded_replay=True),
            CacheGroup(0, CacheKind.SLIDING, 16, kept_tokens=127, is_never_cached=True),
        ),
        (
            spec("MambaSpec", mamba_cache_mode="align", num_speculative_blocks=0),
            CacheGroup(0, CacheKind.STATE, 16, state_by_position=True),
        ),
    ],
)
def test_groups(one: Any, group: CacheGroup) -> None:
    """What models with presets have is compared with the presets: `test_presets.py`."""
    assert read_groups(kv_cache_config(one), vllm_config()) == (group,)


def test_only_caches_that_shards_divide_count_the_shards() -> None:
    config = vllm_config(decode_context_parallel_size=4)
    groups = read_groups(kv_cache_config(MLA, SLIDING), config)
    assert [group.shard_count for group in groups] == [4, 1]


def test_groups_that_take_no_part_are_left_out() -> None:
    groups = CacheGroups.from_vllm(vllm_config(), kv_cache_config(FULL, SLIDING, MAMBA, take_part=(0, 2)))
    assert groups.names == ("0.full", "2.state")
    assert groups.num_listed == 3


def test_blocks_of_another_pool_are_refused() -> None:
    caches = kv_cache_config(FULL, MLA)
    caches.kv_cache_groups[1].host_resident = True
    with pytest.raises(LayoutError, match="cache group 1: host_resident is true"):
        read_groups(caches, vllm_config())


def test_a_drafts_lookahead_is_left_to_decode() -> None:
    config = vllm_config()
    config.num_prefill_lookahead_tokens = 4
    assert CacheGroups.from_vllm(config, kv_cache_config(FULL)).prefill_tokens(100) == 97


@pytest.mark.parametrize(
    ("one", "module", "facts"),
    [
        (
            spec("FullAttentionSpec", dtype=torch.uint8, kv_quant_mode=QuantMode.FP8_PER_TENSOR),
            Layer("fp8"),
            AttentionFacts(2, 64, 64, "float8_e4m3fn", 1),
        ),
        (
            spec("FullAttentionSpec", dtype=torch.uint8, kv_quant_mode=QuantMode.FP8_PER_TENSOR),
            Layer("fp8_e5m2"),
            AttentionFacts(2, 64, 64, "float8_e5m2", 1),
        ),
        (
            spec(
                "FullAttentionSpec",
                dtype=torch.int8,
                kv_quant_mode=QuantMode.INT8_PER_TOKEN_HEAD,
                state_content_bytes=136,
            ),
            Layer("int8_per_token_head"),
            AttentionFacts(2, 64, 64, "int8", 1, encoding="int8_per_token_head", packed_bytes=136),
        ),
        (
            spec("FullAttentionSpec", num_head_slots=4, state_content_bytes=72),
            Layer(),
            AttentionFacts(2, 64, 64, "bfloat16", 2, num_head_slots=4, packed_bytes=72),
        ),
    ],
)
def test_attention(one: Any, module: Any, facts: AttentionFacts) -> None:
    assert only_layer(one, vllm_config({"model.layers.0.attn": module})).cache == facts


class ScaleFiller:
    """The implementation of a layer whose tokens have scales of their own."""

    def __init__(self) -> None:
        self.filled: list[object] = []

    def _ensure_scale_caches(self, kv_cache: object) -> None:
        self.filled.append(kv_cache)


def test_the_first_scales_are_filled_before_anything_is_pulled() -> None:
    """By the layer that has the cache, and by each that shares it."""
    quantised = spec(
        "FullAttentionSpec", kv_quant_mode=QuantMode.INT8_PER_TOKEN_HEAD, state_content_bytes=136
    )
    owner, other, sharer = ScaleFiller(), ScaleFiller(), ScaleFiller()
    names = [f"model.layers.{number}.attn" for number in range(3)]
    modules = {name: Layer(impl=impl) for name, impl in zip(names, (owner, other, sharer), strict=True)}
    config = vllm_config(modules)
    layers = read_layers(kv_cache_config(quantised, FULL), config, is_conv_dim_first=False, fp8_dtype="x")
    tensors = torch.zeros(2, 8)
    caches = {names[0]: tensors[0], names[1]: tensors[1], names[2]: tensors[0]}
    fill_token_scales(layers, caches, config)
    assert [len(one.filled) for one in (owner, other, sharer)] == [1, 0, 1]
    modules[names[2]].impl = object()
    with pytest.raises(
        LayoutError, match=r"layers\.2.*fills scales of int8_per_token_head at an unknown time"
    ):
        fill_token_scales(layers, caches, config)


@pytest.mark.parametrize(("own", "found"), [("int8", "int8"), ("", "auto")])
def test_a_layer_tells_the_dtype_of_its_cache_and_whether_a_plugin_has_it(own: str, found: str) -> None:
    config = vllm_config({"model.layers.0.attn": Layer(own)})
    layer = only_layer(FULL, config, plugin_dtypes=frozenset({"int8"}))
    assert (layer.cache_dtype, layer.is_plugin_dtype) == (found, own == "int8")


def test_a_layer_tells_its_backend_and_its_instruction_set() -> None:
    layer = only_layer(FULL, vllm_config({"model.layers.0.attn": Layer(isa="amx")}))
    assert (layer.name, layer.group, layer.backend, layer.isa) == ("model.layers.0.attn", 0, "Backend", "amx")


@pytest.mark.parametrize(("is_dim_first", "groups_called"), [(True, "n_groups"), (False, "mamba_ngroups")])
def test_a_state(is_dim_first: bool, groups_called: str) -> None:
    config = vllm_config()
    config.model_config.hf_text_config = SimpleNamespace(**{groups_called: 3})
    state = only_layer(MAMBA, config, is_conv_dim_first=is_dim_first).cache
    assert not isinstance(state, AttentionFacts)
    assert (state.mixer, state.is_conv_dim_first, state.num_groups) == ("mamba2", is_dim_first, 3)
    assert state.dtypes == (("bfloat16", 2), ("float32", 4))


def test_a_workers_place() -> None:
    config = vllm_config(decode_context_parallel_size=2, cp_kv_cache_interleave_size=8)
    worker = read_worker(config, kv_cache_config(FULL), tp_rank=3, pp_rank=1, stage=(16, 32))
    assert (worker.stage, worker.num_layers, worker.num_kv_heads) == (range(16, 32), 32, 8)
    assert (worker.dcp_rank, worker.interleave, worker.num_blocks) == (1, 8, 100)


def test_a_draft_on_the_last_stage_alone() -> None:
    config = vllm_config()
    draft = SimpleNamespace(use_mla=True, is_attention_free=False, get_total_num_hidden_layers=lambda: 2)
    config.speculative_config = SimpleNamespace(draft_model_config=draft, method="mtp")
    last = read_worker(config, kv_cache_config(FULL), tp_rank=0, pp_rank=1, stage=(16, 32))
    first = read_worker(config, kv_cache_config(FULL), tp_rank=0, pp_rank=0, stage=(0, 16))
    assert (last.num_layers, last.stage, last.num_draft_kv_heads) == (34, range(16, 34), 0)
    assert (first.num_layers, first.stage) == (34, range(16))


class Platform:
    """vLLM's platform of GPUs of one name each, and of a capability that may not be known."""

    def __init__(self, names: tuple[str, ...], version: str | None, *, is_cuda: bool = True) -> None:
        self.names, self.version, self.is_cuda_alike = names, version, lambda: is_cuda

    def is_cpu(self) -> bool:
        return False

    def is_rocm(self) -> bool:
        return False

    def get_device_name(self, index: int) -> str:
        if not self.names:
            raise NotImplementedError
        return self.names[index]

    def get_device_capability(self, index: int) -> Any:
        version = self.version
        return None if version is None else SimpleNamespace(as_version_str=lambda: version)


@pytest.mark.parametrize(
    ("platform", "name"),
    [
        (Platform(("NVIDIA A100", "NVIDIA H100"), "9.0"), "NVIDIA H100 9.0"),
        (Platform(("NVIDIA A100", "NVIDIA H100"), None), ""),
        (Platform(("XPU", "XPU"), None, is_cuda=False), "XPU"),
        (Platform((), "9.0"), ""),
    ],
)
def test_a_device_has_its_own_name_and_capability(platform: Platform, name: str) -> None:
    assert device_name(platform, 1) == name


def vllm_module(name: str, monkeypatch: pytest.MonkeyPatch, **content: object) -> None:
    """Have imports of a module of vLLM's find one with this content."""
    parent, _, own = name.rpartition(".")
    if parent:
        vllm_module(parent, monkeypatch, **{own: ModuleType(name)})
    module = ModuleType(name)
    vars(module).update(content)
    monkeypatch.setitem(sys.modules, name, module)


def test_a_workers_device_is_that_of_vllms_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm_module(
        "vllm.platforms", monkeypatch, current_platform=Platform(("NVIDIA A100", "NVIDIA H100"), "9.0")
    )
    assert (read_device(0), read_device(1)) == ("NVIDIA A100 9.0", "NVIDIA H100 9.0")


def test_dtypes_with_a_handler_are_a_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 0.33: those of vLLM itself have none. 0.32 has no handlers."""
    vllm_module(
        "vllm.config.cache",
        monkeypatch,
        KV_CACHE_DTYPES=("auto", "fp8", "plugins_own"),
        get_kv_cache_dtype_handler={"plugins_own": object()}.get,
    )
    assert plugin_cache_dtypes() == {"plugins_own"}
    vllm_module("vllm.config.cache", monkeypatch, KV_CACHE_DTYPES=("auto", "fp8"))
    assert plugin_cache_dtypes() == frozenset()


def test_rocm_is_refused_whatever_its_backends_are_called() -> None:
    with pytest.raises(LayoutError, match="ROCm is not supported"):
        device_name(SimpleNamespace(is_rocm=lambda: True), 0)


def test_a_backend_is_told_by_its_module_and_its_distributions() -> None:
    """A class that vLLM derives from a plugin's is of the plugin too."""
    own = type("Own", (), {"__module__": "vllm.own"})
    plugin = type("Plugin", (), {"__module__": "pytest.backend"})
    derived = type("Derived", (plugin,), {"__module__": "vllm.own"})
    unknown = type("Unknown", (), {"__module__": "no_such_package.backend"})
    found = {}
    for one in (own, derived, unknown):
        module = Layer()
        module.get_attn_backend = lambda one=one: one
        found[one] = implementation_of(module)
    assert found == {
        own: "vllm.own.Own",
        derived: f"vllm.own.Derived of pytest {pytest.__version__}",
        unknown: "",
    }
    assert implementation_of(None) == ""


def test_a_cpu_is_told_by_its_instruction_set() -> None:
    found = device_name(SimpleNamespace(is_cpu=lambda: True, is_rocm=lambda: False), 0)
    assert found.startswith("cpu ")
    assert found.endswith(f" {torch.backends.cpu.get_cpu_capability()}")


def test_a_group_whose_layers_differ_in_how_blocks_are_used_is_refused() -> None:
    one = spec("UniformTypeKVCacheSpecs", kv_cache_specs={"a": FULL, "b": SLIDING})
    with pytest.raises(LayoutError, match=r"its layers differ .*: FullAttentionSpec, SlidingWindowSpec"):
        read_groups(kv_cache_config(one), vllm_config())
