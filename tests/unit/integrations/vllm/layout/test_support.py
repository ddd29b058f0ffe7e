"""The connector accepts and refuses exactly what its tables, and so docs/reference/vllm-support.md, name."""

from __future__ import annotations

import dataclasses
import enum
import re
from fractions import Fraction
from pathlib import Path
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

PAGE = Path(__file__).parents[5] / "docs" / "reference" / "vllm-support.md"
DTYPE = SimpleNamespace(itemsize=2)
QuantMode = enum.Enum("QuantMode", ["UNHEARD_OF", "NVFP4", *QUANT_MODES])
FIELDS = {
    "block_size": 16,
    "dcp_sharded": False,
    "sliding_window": 64,
    "extra_retained_tokens": 0,
    "num_speculative_blocks": 0,
    "mamba_cache_mode": "none",
    "num_kv_heads": 2,
    "head_size": 64,
    "head_size_v": 64,
    "dtype": DTYPE,
    "kv_quant_mode": QuantMode["NONE"],
    "tokens_per_state": 1,
    "num_head_slots": None,
    "state_content_bytes": None,
}
NAMES_OF_CACHES = [*support.CACHES, "UnheardOfSpec"]
NAMES_OF_BACKENDS = [*support.BACKENDS, "UnheardOfBackend"]
ACCEPTED = [name for name, found in support.CACHES.items() if found.kind is not None]


def spec(name: str, **more: Any) -> Any:
    """Return a spec of a class of this name, with the fields of vLLM's."""
    return type(name, (SimpleNamespace,), {})(**(FIELDS | more))


def configs(one: Any, **more: Any) -> tuple[Any, Any]:
    """Return the KVCacheConfig and the VllmConfig of an engine with one group of one layer."""
    group = SimpleNamespace(kv_cache_spec=one, layer_names=["model.layers.0.attn"])
    caches = SimpleNamespace(num_blocks=8, kv_cache_groups=[group], transfer_group_ids=(0,))
    parallel = dict.fromkeys(support.PARALLEL_SIZES, 1) | more
    return caches, SimpleNamespace(
        parallel_config=SimpleNamespace(**parallel),
        cache_config=SimpleNamespace(
            cache_dtype="auto", calculate_kv_scales=more.get("calculate_kv_scales", False)
        ),
        compilation_config=SimpleNamespace(static_forward_context={}),
    )


def is_accepted_as_cache(one: Any, **more: Any) -> bool:
    """Whether the connector reads groups and layers of an engine with this spec."""
    caches, config = configs(one, **more)
    try:
        read_groups(caches, config)
        if not type(one).__name__.startswith("Mamba"):
            read_layers(caches, config, is_conv_dim_first=False, fp8_dtype="float8_e4m3fn")
    except LayoutError:
        return False
    return True


def facts_of(one: Any) -> AttentionFacts:
    """Return the facts that are read of a spec."""
    caches, config = configs(one)
    (layer,) = read_layers(caches, config, is_conv_dim_first=False, fp8_dtype="float8_e4m3fn")
    assert isinstance(layer.cache, AttentionFacts)
    return layer.cache


@pytest.mark.parametrize("name", NAMES_OF_CACHES)
def test_caches(name: str) -> None:
    found = support.CACHES.get(name)
    assert is_accepted_as_cache(spec(name)) == (found is not None and found.kind is not None)


@pytest.mark.parametrize("name", [name for name in NAMES_OF_CACHES if name not in ACCEPTED])
def test_a_cache_that_is_refused_is_named_with_the_reason(name: str) -> None:
    reason = support.CACHES[name].note if name in support.CACHES else "not known here"
    with pytest.raises(LayoutError, match=f"{name} is .*{re.escape(reason)}"):
        read_groups(*configs(spec(name)))
    with pytest.raises(LayoutError, match=f"'model.layers.0.attn': a cache of {name} is"):
        read_layers(*configs(spec(name)), is_conv_dim_first=False, fp8_dtype="float8_e4m3fn")


@pytest.mark.parametrize("name", NAMES_OF_CACHES)
def test_a_uniform_group_is_accepted_where_its_layers_are(name: str) -> None:
    one = type(support.UNIFORM_SPEC, (), {})()
    one.kv_cache_specs = {"model.layers.0.attn": spec(name)}
    found = support.CACHES.get(name)
    try:
        read_groups(*configs(one))
    except LayoutError:
        assert found is None or found.kind is None
    else:
        assert found is not None
        assert found.kind is not None


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


@pytest.mark.parametrize("name", NAMES_OF_BACKENDS)
def test_backends(name: str) -> None:
    described = {
        content
        for content, facts in CONTENTS.items()
        if is_described(LayerFacts("model.layers.0.attn", 0, facts, name, isa="vec"), facts)
    }
    found = support.BACKENDS.get(name)
    assert (found in described) if found is not None else (described == set())
    assert not described or any(described <= alike for alike in ALIKE)


@pytest.mark.parametrize("name", support.REFUSED_BACKENDS)
def test_backends_that_are_refused(name: str) -> None:
    assert support.REFUSED_BACKENDS[name] in (support.refusal_of_backend(name) or "")
    assert name not in support.BACKENDS


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
    assert (
        is_accepted_as_cache(spec("FullAttentionSpec"), **{name: 2})
        == support.PARALLEL_SIZES[name].is_supported
    )


@pytest.mark.parametrize("found", [0, Fraction(1, 4)])
def test_a_token_of_several_states_is_refused(found: object) -> None:
    (rule,) = support.SPEC_RULES
    assert is_accepted_as_cache(spec("FullAttentionSpec", tokens_per_state=4))
    with pytest.raises(LayoutError) as caught:
        facts_of(spec("FullAttentionSpec", **{rule.field: found}))
    assert f"FullAttentionSpec: {rule.field} is {found}" in caught.value.message
    assert support.SUPPORT_PAGE in caught.value.message


@pytest.mark.parametrize(("mode", "is_refused"), [("NONE", False), ("FP8_PER_TENSOR", True), ("NVFP4", True)])
def test_scales_that_are_calculated_at_run_time(mode: str, is_refused: bool) -> None:
    one = spec("FullAttentionSpec", kv_quant_mode=QuantMode[mode])
    assert is_accepted_as_cache(one)
    assert is_accepted_as_cache(one, calculate_kv_scales=True) != is_refused
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
