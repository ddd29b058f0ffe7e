"""Read the facts of an engine's cache from vLLM's objects, as plain values. No other module reads them.

Specs are distinguished by the exact names of their classes: a subclass may mean something else.
Attributes are those of vLLM 0.32 and 0.33 (vllm/v1/kv_cache_interface.py, vllm/config). vLLM itself is
imported only in the functions that call it, so that this can be tested without it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from importlib import metadata
from platform import machine
from typing import Any

from kvxferd.errors import LayoutError
from kvxferd.integrations.vllm.layout.facts import (
    AttentionFacts,
    CacheGroup,
    CacheKind,
    LayerFacts,
    StateFacts,
    WorkerFacts,
    layer_error,
)
from kvxferd.integrations.vllm.layout.support import (
    CACHES,
    METHODS_WITHOUT_DRAFT_CACHE,
    PARALLEL_SIZES,
    QUANTISED_CACHE_RULES,
    RING_SPEC,
    ROW_DTYPES,
    SPEC_RULES,
    SUPPORT_PAGE,
    UNIFORM_SPEC,
)

# The attributes by which configurations name the number of Mamba2's groups of B and C.
_GROUP_COUNTS = ("n_groups", "mamba_n_groups", "mamba_ngroups")


def read_groups(kv_cache_config: Any, vllm_config: Any) -> tuple[CacheGroup, ...]:
    """Return the groups that take part in transfers. Raises LayoutError for an unsupported kind.

    The scheduler and the workers of an engine get the same groups.
    """
    parallel = vllm_config.parallel_config
    for size, support in PARALLEL_SIZES.items():
        if not support.is_supported and (value := getattr(parallel, size, 1)) > 1:
            raise LayoutError(
                f"cannot describe the cache: {size} is {value}; {support.note} (see {SUPPORT_PAGE})"
            )
    groups = kv_cache_config.kv_cache_groups
    for index in kv_cache_config.transfer_group_ids:
        if getattr(groups[index], "host_resident", False):
            raise LayoutError(
                f"cannot describe cache group {index}: host_resident is true, and the ids of HiSparse's host "
                f"blocks are not those of its other groups (see {SUPPORT_PAGE})"
            )
    return tuple(
        _read_group(index, _specs(groups[index].kv_cache_spec), parallel.decode_context_parallel_size)
        for index in kv_cache_config.transfer_group_ids
    )


def read_layers(
    kv_cache_config: Any,
    vllm_config: Any,
    *,
    is_conv_dim_first: bool,
    fp8_dtype: str,
    has_mx_scales: bool = False,
    plugin_dtypes: frozenset[str] = frozenset(),
) -> list[LayerFacts]:
    """Return the facts of every layer with a cache of its own on this rank. Raises LayoutError.

    `fp8_dtype` is this platform's fp8 dtype; `is_conv_dim_first` whether convolution states are DS, and
    `has_mx_scales` and `plugin_dtypes` what `indexers_have_mx_scales` and `plugin_cache_dtypes` return.
    """
    modules = vllm_config.compilation_config.static_forward_context
    layers = []
    for index in kv_cache_config.transfer_group_ids:
        group = kv_cache_config.kv_cache_groups[index]
        for name in group.layer_names:
            module = modules.get(name)
            spec = _spec_of(group.kv_cache_spec, name)
            kind = _kind_of(spec)
            if kind is None:
                raise layer_error(name, _why_refused(spec))
            if kind is CacheKind.STATE and _class_name(spec) != RING_SPEC:
                cache: AttentionFacts | StateFacts = _read_state(spec, vllm_config, is_conv_dim_first)
            else:
                cache = _read_attention(name, spec, module, vllm_config, fp8_dtype)
            isa = str(getattr(module, "isa", ""))
            dtype = _cache_dtype(module, vllm_config)
            layers.append(
                LayerFacts(
                    name,
                    index,
                    cache,
                    _backend_name(module),
                    isa,
                    implementation_of(module),
                    has_mx_scales,
                    dtype,
                    dtype in plugin_dtypes,
                )
            )
    return layers


def read_worker(
    vllm_config: Any,
    kv_cache_config: Any,
    *,
    tp_rank: int,
    pp_rank: int,
    stage: tuple[int, int],
    vllm_version: str = "",
    device: str = "",
) -> WorkerFacts:
    """Return this worker's position in its engine."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    draft = draft_model(vllm_config)
    return WorkerFacts(
        start_layer=stage[0],
        end_layer=stage[1],
        num_model_layers=model.get_total_num_hidden_layers(),
        num_kv_heads=total_kv_heads(model),
        num_draft_layers=0 if draft is None else draft.get_total_num_hidden_layers(),
        num_draft_kv_heads=0 if draft is None else total_kv_heads(draft),
        tp_size=parallel.tensor_parallel_size,
        tp_rank=tp_rank,
        pp_size=parallel.pipeline_parallel_size,
        pp_rank=pp_rank,
        dcp_size=parallel.decode_context_parallel_size,
        interleave=parallel.cp_kv_cache_interleave_size or 1,
        num_blocks=kv_cache_config.num_blocks,
        vllm_version=vllm_version,
        device=device,
    )


def total_kv_heads(model_config: Any) -> int:
    """Return a model's KV heads over all ranks; 0 where it has none, or has latents instead."""
    if model_config.use_mla or model_config.is_attention_free:
        return 0
    return int(model_config.get_total_num_kv_heads())


def draft_model(vllm_config: Any) -> Any | None:
    """Return the configuration of the draft model, if its layers have caches of their own."""
    speculative = vllm_config.speculative_config
    # For these methods vLLM sets a draft model too: the model itself where there is no other.
    return (
        None
        if speculative is None or speculative.method in METHODS_WITHOUT_DRAFT_CACHE
        else speculative.draft_model_config
    )


def read_position(vllm_config: Any) -> tuple[int, int, tuple[int, int]]:
    """Return this worker's tensor-parallel rank, its pipeline stage, and that stage's layers, from vLLM."""
    from vllm.distributed import parallel_state
    from vllm.distributed.utils import get_pp_indices

    stage = parallel_state.get_pp_group()
    num_layers = vllm_config.model_config.get_total_num_hidden_layers()
    layers = get_pp_indices(num_layers, stage.rank_in_group, stage.world_size)
    return parallel_state.get_tensor_model_parallel_rank(), stage.rank_in_group, layers


def _specs(spec: Any) -> list[Any]:
    """Return the specs of a group's layers: one for all, or one for each."""
    return list(spec.kv_cache_specs.values()) if _class_name(spec) == UNIFORM_SPEC else [spec]


def _spec_of(spec: Any, layer: str) -> Any:
    return spec.kv_cache_specs[layer] if _class_name(spec) == UNIFORM_SPEC else spec


def _class_name(spec: Any) -> str:
    return type(spec).__name__


def _kind_of(spec: Any) -> CacheKind | None:
    """Return how the blocks of a spec are used; None for a spec that is refused."""
    found = CACHES.get(_class_name(spec))
    return None if found is None else found.kind


def _read_group(index: int, specs: list[Any], dcp_size: int) -> CacheGroup:
    """Return one group."""
    found = {_group_of(index, spec, dcp_size) for spec in specs}
    if len(found) != 1:
        raise LayoutError(
            f"cannot describe cache group {index}: its layers differ in how blocks are used: "
            + ", ".join(sorted({_class_name(spec) for spec in specs}))
        )
    return found.pop()


def _group_of(index: int, spec: Any, dcp_size: int) -> CacheGroup:
    """Return the group of one layer's spec."""
    kind = _kind_of(spec)
    if _class_name(spec) == RING_SPEC:
        return CacheGroup(index, CacheKind.STATE, spec.block_size)
    if kind is CacheKind.STATE:
        return CacheGroup(
            index,
            CacheKind.STATE,
            spec.block_size,
            speculative_blocks=spec.num_speculative_blocks,
            state_by_position=spec.mamba_cache_mode != "none",
        )
    if kind is None:
        raise LayoutError(f"cannot describe cache group {index}: {_why_refused(spec)}")
    shards = dcp_size if spec.dcp_sharded else 1
    if kind is CacheKind.FULL:
        return CacheGroup(index, CacheKind.FULL, spec.block_size, shard_count=shards)
    kept = max(1, spec.sliding_window - 1 + spec.extra_retained_tokens)
    return CacheGroup(
        index,
        CacheKind.SLIDING,
        spec.block_size,
        kept,
        shards,
        # vLLM computes such a window again after a hit in its cache, unless a load brings it.
        is_never_cached=bool(getattr(spec, "bounded_replay", False)),
    )


def _why_refused(spec: Any) -> str:
    """Return why a spec without a kind is refused."""
    name = _class_name(spec)
    known = f"not supported: {CACHES[name].note}" if name in CACHES else "not known here"
    return f"a cache of {name} is {known} (see {SUPPORT_PAGE})"


def _read_attention(name: str, spec: Any, module: Any, vllm_config: Any, fp8_dtype: str) -> AttentionFacts:
    """Return the facts of an attention layer. Raises LayoutError."""
    mode = spec.kv_quant_mode.name
    rules = [(rule, spec) for rule in SPEC_RULES]
    if mode != "NONE":
        rules += [(rule, vllm_config.cache_config) for rule in QUANTISED_CACHE_RULES]
    refusals = [rule.refusal.format(found=found) for rule, found in rules if not rule.accepts(found)]
    if refusals:
        raise layer_error(name, f"{_class_name(spec)}: {'; '.join(refusals)} (see {SUPPORT_PAGE})")
    dtype, itemsize = _dtype_name_and_size(spec.dtype)
    packed = spec.state_content_bytes
    row_dtype = getattr(spec, "cache_dtype_str", None)
    is_row = row_dtype in ROW_DTYPES and packed is not None
    if mode == "FP8_PER_TENSOR" and dtype == "uint8" and not is_row:
        dtype = "float8_e5m2" if "e5m2" in _cache_dtype(module, vllm_config) else fp8_dtype
    packing = str(row_dtype) if is_row else mode.lower()
    is_latent = CACHES[_class_name(spec)].is_latent
    return AttentionFacts(
        num_heads=1 if is_latent else spec.num_kv_heads,
        head_size=packed if is_row else spec.head_size,
        head_size_v=0 if is_latent else spec.head_size_v,
        dtype=dtype,
        itemsize=itemsize,
        encoding=packing if is_row or mode not in ("NONE", "FP8_PER_TENSOR") else "",
        tokens_per_state=spec.tokens_per_state,
        num_head_slots=spec.num_head_slots,
        packed_bytes=None if is_row else packed,
    )


def _read_state(spec: Any, vllm_config: Any, is_conv_dim_first: bool) -> StateFacts:
    """Return the facts of a layer with a recurrent state."""
    return StateFacts(
        mixer=spec.mamba_type.name.lower(),
        shapes=tuple(tuple(shape) for shape in spec.shapes),
        dtypes=tuple(_dtype_name_and_size(dtype) for dtype in spec.dtypes),
        is_conv_dim_first=is_conv_dim_first,
        is_replicated=spec.tp_replicated,
        num_groups=_num_groups(vllm_config.model_config.hf_text_config),
    )


def _num_groups(config: Any) -> int | None:
    """Return how many groups of B and C a model's configuration has."""
    for name in _GROUP_COUNTS:
        value = getattr(config, name, None)
        if isinstance(value, int):
            return value
    return None


def _dtype_name_and_size(dtype: Any) -> tuple[str, int]:
    """Return a torch dtype's name and size."""
    return str(dtype).removeprefix("torch."), dtype.itemsize


def _cache_dtype(module: Any, vllm_config: Any) -> str:
    """Return vLLM's name of the dtype of a layer's cache: its own, else the engine's."""
    return str(getattr(module, "kv_cache_dtype", None) or vllm_config.cache_config.cache_dtype)


def _backend_name(module: Any) -> str:
    """Return the class name of a layer's attention backend, "" if the layer has none."""
    if module is None or not hasattr(module, "get_attn_backend"):
        return ""
    return str(module.get_attn_backend().__name__)


@functools.cache
def _distributions(search_path: tuple[str, ...]) -> Mapping[str, list[str]]:
    """Return the distributions of each package; it takes a second, and `search_path` is sys.path."""
    return metadata.packages_distributions()


def implementation_of(module: Any) -> str:
    """Return the module and class of a layer's backend, and each distribution outside vLLM with its version.

    vLLM derives classes of its own from a plugin's, so the bases count too. "" if there is no backend, or
    part of it is of no installed distribution.
    """
    if module is None or not hasattr(module, "get_attn_backend"):
        return ""
    backend = module.get_attn_backend()
    bases = (*backend.__mro__, *type(getattr(module, "impl", None)).__mro__)
    packages = {base.__module__.partition(".")[0] for base in bases} - {"vllm", *sys.stdlib_module_names}
    known = _distributions(tuple(sys.path)) if packages else {}
    if not packages <= known.keys():
        return ""
    names = sorted({name for package in packages for name in known[package]})
    own = [f" of {name} {metadata.version(name)}" for name in names]
    return f"{backend.__module__}.{backend.__qualname__}{''.join(own)}"


def conv_state_is_dim_first() -> bool:
    """Return whether vLLM keeps convolution states as DS in this process."""
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    return bool(is_conv_state_dim_first())


def platform_fp8_dtype() -> str:
    """Return the dtype that vLLM uses for fp8 on this platform."""
    from vllm.platforms import current_platform

    return _dtype_name_and_size(current_platform.fp8_dtype())[0]


def read_device(index: int) -> str:
    """Return the name of a worker's device and what kernels choose by, from vLLM; "" where it has no name.

    `index` is torch's. A GPU has its compute capability, a CPU its architecture and widest instruction set.
    Raises LayoutError for ROCm.
    """
    from vllm.platforms import current_platform

    return device_name(current_platform, index)


def device_name(platform: Any, index: int) -> str:
    """Return the same of a platform of vLLM's. Raises LayoutError for ROCm."""
    if platform.is_rocm():
        raise LayoutError(f"cannot describe the cache: ROCm is not supported (see {SUPPORT_PAGE})")
    if platform.is_cpu():
        import torch

        return f"cpu {machine()} {torch.backends.cpu.get_cpu_capability()}"
    try:
        name, capability = platform.get_device_name(index), platform.get_device_capability(index)
    except NotImplementedError:
        return ""
    if capability is not None:
        return f"{name} {capability.as_version_str()}"
    return "" if platform.is_cuda_alike() else str(name or "")


def plugin_cache_dtypes() -> frozenset[str]:
    """Return the dtypes of caches for which a plugin has registered a handler, from vLLM."""
    try:
        from vllm.config.cache import KV_CACHE_DTYPES, get_kv_cache_dtype_handler
    except ImportError:  # vLLM 0.32 has no such handlers
        return frozenset()
    return frozenset(name for name in KV_CACHE_DTYPES if get_kv_cache_dtype_handler(name) is not None)


def indexers_have_mx_scales() -> bool:
    """Return whether a sparse attention's indexer keeps powers of two as scales on this GPU, from vLLM."""
    try:
        from vllm.utils.deep_gemm import mqa_logits_use_mx_scales
    except ImportError:  # vLLM 0.32 has float32 on every GPU
        return False
    return bool(mqa_logits_use_mx_scales())


def fill_token_scales(layers: list[LayerFacts], kv_caches: Mapping[str, Any], vllm_config: Any) -> None:
    """Have vLLM fill the scales of each token with its first value now.

    Each layer does so in its first forward pass, where it would overwrite scales that were pulled before; one
    that shares another layer's tensor does it once more. Raises LayoutError for a vLLM that does it in
    another way.
    """
    modules = vllm_config.compilation_config.static_forward_context
    quantised = {
        _place_of(kv_caches[layer.name]): layer.cache.encoding
        for layer in layers
        # Latents have scales of their own, which are written with each row.
        if isinstance(layer.cache, AttentionFacts)
        and layer.cache.head_size_v > 0
        and layer.cache.encoding.endswith("_per_token_head")
    }
    for name, cache in kv_caches.items():
        if isinstance(cache, (list, tuple)) or _place_of(cache) not in quantised:
            continue
        fill = getattr(getattr(modules.get(name), "impl", None), "_ensure_scale_caches", None)
        if fill is None:
            mode = quantised[_place_of(cache)]
            raise layer_error(name, f"this vLLM fills scales of {mode} at an unknown time")
        fill(cache)


def _place_of(tensor: Any) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Return what is equal for two layers' tensors of one cache; the page of a state may begin there too."""
    return tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride())
