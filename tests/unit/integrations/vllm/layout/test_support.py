"""The connector accepts and refuses exactly what its tables, and so docs/reference/vllm-support.md, name."""

from __future__ import annotations

import dataclasses
import enum
import re
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest

from docs.tools.vllm_tables import QUANT_MODES
from kvxferd.errors import LayoutError
from kvxferd.ids import GroupName, RegionId
from kvxferd.integrations.vllm.layout import support
from kvxferd.integrations.vllm.layout.attention import is_described
from kvxferd.integrations.vllm.layout.facts import (
    AttentionFacts,
    LayerFacts,
    LayerKey,
    StateFacts,
    WorkerFacts,
)
from kvxferd.integrations.vllm.layout.opaque import is_opaque
from kvxferd.integrations.vllm.layout.specs import read_groups, read_layers
from kvxferd.integrations.vllm.layout.states import state_tensors
from kvxferd.integrations.vllm.layout.support import BlockContent, version_warning
from kvxferd.layout import CacheTensor
from kvxferd.layout.tensor_views import TensorView
from tests.support import vllm_specs

QuantMode = enum.Enum("QuantMode", ["UNHEARD_OF", "NVFP4", *QUANT_MODES])


def spec(name: str, **more: Any) -> Any:
    """Return a spec of a class of this name, with the fields of all of vLLM's."""
    windows = {"sliding_window": 64, "extra_retained_tokens": 0}
    states = {"num_speculative_blocks": 0, "mamba_cache_mode": "none"}
    return vllm_specs.spec(name, **windows | states | {"kv_quant_mode": QuantMode["NONE"]} | more)


def configs(one: Any, *, calculate_kv_scales: bool = False, **more: Any) -> tuple[Any, Any]:
    """Return the KVCacheConfig and the VllmConfig of an engine with one group of one layer."""
    group = SimpleNamespace(kv_cache_spec=one, layer_names=["model.layers.0.attn"])
    caches = SimpleNamespace(num_blocks=8, kv_cache_groups=[group], transfer_group_ids=(0,))
    config = vllm_specs.vllm_config(**dict.fromkeys(support.PARALLEL_SIZES, 1) | more)
    config.cache_config.calculate_kv_scales = calculate_kv_scales
    return caches, config


def read(one: Any, **more: Any) -> None:
    """Have the connector read groups and layers of an engine with this spec."""
    caches, config = configs(one, **more)
    read_groups(caches, config)
    if not type(one).__name__.startswith("Mamba"):
        read_layers(caches, config, is_conv_dim_first=False, fp8_dtype="float8_e4m3fn")


def is_accepted(one: Any, **more: Any) -> bool:
    """Whether an engine with this spec is."""
    try:
        read(one, **more)
    except LayoutError:
        return False
    return True


def facts_of(one: Any) -> AttentionFacts:
    """Return the facts that are read of a spec."""
    caches, config = configs(one)
    (layer,) = read_layers(caches, config, is_conv_dim_first=False, fp8_dtype="float8_e4m3fn")
    assert isinstance(layer.cache, AttentionFacts)
    return layer.cache


@pytest.mark.parametrize("name", [*support.CACHES, "UnheardOfSpec"])
def test_caches(name: str) -> None:
    """By themselves, and as the layers of a uniform group. What is refused is named with the reason."""
    uniform = type(support.UNIFORM_SPEC, (), {})()
    uniform.kv_cache_specs = {"model.layers.0.attn": spec(name)}
    found = support.CACHES.get(name)
    if found is not None and found.kind is not None:
        read(spec(name))
        read_groups(*configs(uniform))
        return
    reason = re.escape(found.note if found is not None else "not known here")
    for one in (spec(name), uniform):
        with pytest.raises(LayoutError, match=f"{name} is .*{reason}"):
            read_groups(*configs(one))
    with pytest.raises(LayoutError, match=f"'model.layers.0.attn': a cache of {name} is"):
        read_layers(*configs(spec(name)), is_conv_dim_first=False, fp8_dtype="float8_e4m3fn")


CONTENTS = {  # facts of each kind of block
    BlockContent.KEY_THEN_VALUE: AttentionFacts(2, 16, 16, "bfloat16", 2),
    BlockContent.LATENT_ROW: AttentionFacts(1, 32, 0, "bfloat16", 2),
    BlockContent.DEEPSEEK_RECORD: AttentionFacts(1, 584, 0, "uint8", 1, "fp8_ds_mla"),
    BlockContent.INDEXER: AttentionFacts(1, 132, 0, "uint8", 1),
    BlockContent.CPU_PACKED: AttentionFacts(2, 16, 16, "bfloat16", 2),
}
# Keys and values, or rows, of a layer are one kind of facts: the backend alone tells how they are packed.
ALIKE = (
    {BlockContent.KEY_THEN_VALUE, BlockContent.CPU_PACKED},
    {BlockContent.LATENT_ROW, BlockContent.DEEPSEEK_RECORD, BlockContent.INDEXER},
)


@pytest.mark.parametrize("name", [*support.BACKENDS, *support.REFUSED_BACKENDS, "UnheardOfBackend"])
def test_backends(name: str) -> None:
    described = {
        content
        for content, facts in CONTENTS.items()
        if is_described(LayerFacts("model.layers.0.attn", 0, facts, name, isa="vec"), facts)
    }
    found = support.BACKENDS.get(name)
    assert (found in described) if found is not None else (described == set())
    assert not described or any(described <= alike for alike in ALIKE)


@pytest.mark.parametrize("mode", [mode.name for mode in QuantMode])
def test_quantisation(mode: str) -> None:
    """A mode that is not known is of opaque pages; of those that are, some need a packing of their own."""
    one = spec("FullAttentionSpec", kv_quant_mode=QuantMode[mode])
    facts = facts_of(one)
    layer = LayerFacts("model.layers.0.attn", 0, facts, "TritonAttentionBackend")
    assert is_described(layer, facts) == (mode in ("NONE", "FP8_PER_TENSOR"))
    halves = 2 if mode == "INT4_PER_TOKEN_HEAD" else 1
    packed = dataclasses.replace(facts, packed_bytes=facts.element_bytes // halves + 8)
    assert is_described(dataclasses.replace(layer, cache=packed), packed) == mode.endswith("_PER_TOKEN_HEAD")
    assert mode in QUANT_MODES or facts.encoding == mode.lower()


@pytest.mark.parametrize("mode", [mode.name for mode in QuantMode])
@pytest.mark.parametrize("dtype", [*support.ROW_DTYPES, "of_no_row"])
def test_rows_are_known_by_their_dtype(dtype: str, mode: str) -> None:
    one = spec(
        "MLAAttentionSpec", kv_quant_mode=QuantMode[mode], cache_dtype_str=dtype, state_content_bytes=656
    )
    facts = facts_of(one)
    is_row = dtype in support.ROW_DTYPES
    assert facts.encoding in ((dtype,) if is_row else ("", mode.lower()))
    assert facts.content_bytes == (656 * 2 if is_row else 656)
    assert is_row == (facts.head_size == 656)


STATES = {
    "mamba1": ((3, 16), (16, 4)),
    "mamba2": ((3, 32 + 2 * 8), (4, 8, 8)),
    "gdn_attn": ((3, 32 + 2 * 8), (4, 8, 8)),
    "short_conv": ((3, 16),),
    "linear": ((4, 8, 8),),
    "unheard_of": ((4, 8, 8),),
}


@pytest.mark.parametrize("mixer", [*support.MIXERS, "unheard_of"])
@pytest.mark.parametrize("more", [0, 1])
def test_mixers(mixer: str, more: int) -> None:
    shapes = STATES[mixer] + ((4, 8, 8),) * more
    state = StateFacts(mixer, shapes, (("bfloat16", 2),) * len(shapes), num_groups=1)
    size = sum(state.part_bytes)
    view = TensorView(RegionId("r"), 0, (4, size), (size, 1), 1)
    layer = LayerFacts("model.layers.0.mixer", 0, state, implementation="vllm.Some", cache_dtype="auto")
    worker = WorkerFacts(0, 1, 1, 1, num_blocks=4, device="cpu", vllm_version="0.33.0")

    def describe() -> list[CacheTensor]:
        return state_tensors(layer, state, LayerKey(0, ""), (view,), GroupName("0.state"), worker)

    is_known = mixer in support.MIXERS and support.MIXERS[mixer][0] == len(shapes)
    assert any(map(is_opaque, describe())) != is_known


@pytest.mark.parametrize("name", support.PARALLEL_SIZES)
def test_parallel_sizes(name: str) -> None:
    is_supported = support.PARALLEL_SIZES[name].is_supported
    assert is_accepted(spec("FullAttentionSpec"), **{name: 2}) == is_supported


@pytest.mark.parametrize("found", [0, Fraction(1, 4)])
def test_a_token_of_several_states_is_refused(found: object) -> None:
    (rule,) = support.SPEC_RULES
    assert is_accepted(spec("FullAttentionSpec", tokens_per_state=4))
    with pytest.raises(LayoutError) as caught:
        facts_of(spec("FullAttentionSpec", **{rule.field: found}))
    assert f"FullAttentionSpec: {rule.field} is {found}" in caught.value.message
    assert support.SUPPORT_PAGE in caught.value.message


@pytest.mark.parametrize(("mode", "is_refused"), [("NONE", False), ("FP8_PER_TENSOR", True), ("NVFP4", True)])
def test_scales_that_are_calculated_at_run_time(mode: str, is_refused: bool) -> None:
    one = spec("FullAttentionSpec", kv_quant_mode=QuantMode[mode])
    assert is_accepted(one)
    assert is_accepted(one, calculate_kv_scales=True) != is_refused
    assert len(support.QUANTISED_CACHE_RULES) == 1


@pytest.mark.parametrize(
    ("version", "is_known"),
    [
        ("0.32.0", True),
        ("0.33", True),
        ("0.33.1+cpu", True),
        ("0.33.0rc1.dev3", True),
        ("0.320.0", False),
        ("0.3", False),
        ("0.34.0", False),
        ("1.32.0", False),
        ("dev", False),
        ("", False),
    ],
)
def test_another_version_is_warned_of(version: str, is_known: bool) -> None:
    warning = version_warning(version)
    assert (warning is None) == is_known
    if warning is not None:
        assert version in warning


@pytest.mark.parametrize(
    ("declared", "version", "found"),
    [("", "0.33.0", "0.33.0"), ("mine", "0.33.0", "mine"), ("", "dev", ""), ("mine", "dev", "mine")],
)
def test_a_source_tree_of_vllm_has_no_version_but_a_declared_one(
    declared: str, version: str, found: str
) -> None:
    assert support.version_of_opaque_caches(declared, version) == found
