"""Runs kernels of vLLM that store records, in Triton's interpreter, and in vLLM's Python; prints JSON.

python vllm_kernels.py DIRECTORY

DIRECTORY is for a module of its kernels' own text: the functions alone, because on a CPU vLLM replaces
Triton. For each record it prints which bytes of a page of `NUM_STATES` records a kernel changes for one of
them, in block 1 of several that are longer than their records. Of a vLLM without one of the kernels it prints
what is missing.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

NUM_STATES, PADDING, POISON = 4, 64, 0xEE
FILES = {
    "models/deepseek_v41/common/ops/cache_utils.py": ["quantize_and_insert_k_kernel"],
    "models/deepseek_v41/common/ops/fused_compress_quant_cache.py": [
        "_rope_quant_insert_kernel",
        "_rope_quant_insert_mxfp8_kernel",
        "_rope_quant_insert_nvfp4_kernel",
    ],
    "models/deepseek_v41/common/ops/indexer_k_store.py": ["_indexer_k_norm_rope_quant_store_kernel"],
    "v1/attention/ops/common.py": ["pack_ue8m0_x4"],
}
# The conversion to fp4 is an instruction of GPUs; which bytes are stored does not depend on it.
HEAD = """import triton
import triton.language as tl


@triton.jit
def _fp32x2_to_fp4x2(low, high):
    return (low + high).to(tl.uint8)
"""


def kernels_of(package: Path, directory: Path) -> Any:
    """Return a module of the kernels' own text."""
    parts = [HEAD]
    for name, functions in FILES.items():
        text = (package / name).read_text()
        found = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}
        if absent := set(functions) - found.keys():
            raise LookupError(f"this vLLM has no {min(absent)}")
        parts += ["@triton.jit\n" + str(ast.get_source_segment(text, found[one])) for one in functions]
    (directory / "kernels_of_vllm.py").write_text("\n\n\n".join(parts) + "\n")
    sys.path.insert(0, str(directory))
    return importlib.import_module("kernels_of_vllm")


def changed(size: int, state: int, store: Callable[[Any, Any, int], None]) -> list[int]:
    """Return the bytes of block 1 that `store` changes, and -1 for any of another block."""
    import torch

    stride = NUM_STATES * size + PADDING
    cache = torch.full((3, stride), POISON, dtype=torch.uint8)
    store(cache.flatten(), torch.tensor([NUM_STATES + state]), stride)
    blocks = (cache != POISON).nonzero().tolist()
    return sorted({place if block == 1 else -1 for block, place in blocks})


def main(directory: str) -> dict[str, list[list[int]]]:
    """Return the changed bytes for each record, for each state of a block."""
    import torch

    package = importlib.util.find_spec("vllm")
    assert package is not None
    assert package.submodule_search_locations is not None
    kernels = kernels_of(Path(package.submodule_search_locations[0]), Path(directory))
    torch.manual_seed(1)
    latent = torch.randn(1, 512, dtype=torch.bfloat16)
    cos_sin, position = torch.ones(4, 64), torch.tensor([0])

    def v4(cache: Any, slots: Any, stride: int) -> None:
        sizes = {"input_dim": 512, "fp8_dim": 448, "bf16_dim": 64, "scale_dim": 8, "quant_block": 64}
        kernels.quantize_and_insert_k_kernel[(1,)](
            latent, slots, cache, 1, **sizes, cache_block_size=NUM_STATES, token_data_size=576,
            block_stride=stride, fp8_max=448.0, n_quant_blocks=8,
        )  # fmt: skip

    def record(name: str) -> Callable[[Any, Any, int], None]:
        def store(cache: Any, slots: Any, stride: int) -> None:
            getattr(kernels, name)[(1,)](
                latent, position, cos_sin, cache, slots, COS_STRIDE=64, CACHE_STRIDE=stride,
                CACHE_BLOCK=NUM_STATES, COMPRESS_RATIO=1, SANITIZE_CACHE_NANS=False,
            )  # fmt: skip

        return store

    def indexer(key_bytes: int, *, mx_scale: bool) -> Callable[[Any, Any, int], None]:
        def store(cache: Any, slots: Any, stride: int) -> None:
            kernels._indexer_k_norm_rope_quant_store_kernel[(1,)](
                latent[:, :128], 128, position, torch.ones(128), 1e-6, cos_sin, 64, cache, slots, NUM_STATES,
                HEAD_SIZE=128, ROPE_HEAD_DIM=64, COMPRESS_RATIO=1, TOKEN_STRIDE=key_bytes, SCALE_DIM=4,
                KV_BLOCK_STRIDE=stride, FP8_MAX=448.0, USE_FP4=key_bytes == 64, MX_SCALE=mx_scale,
                SHUFFLE=False, BLOCK_TILE_SIZE=16, HEAD_TILE_SIZE=16,
            )  # fmt: skip

        return store

    records = {
        "584": (584, v4),
        "584 compressed": (584, record("_rope_quant_insert_kernel")),
        "528": (528, record("_rope_quant_insert_mxfp8_kernel")),
        "288": (288, record("_rope_quant_insert_nvfp4_kernel")),
        "132": (132, indexer(128, mx_scale=False)),
        "132 mx": (132, indexer(128, mx_scale=True)),
        "68": (68, indexer(64, mx_scale=False)),
    }
    return {
        name: [changed(size, state, store) for state in range(NUM_STATES)]
        for name, (size, store) in records.items()
    }


if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        reply: object = main(*sys.argv[1:])
    except LookupError as error:
        reply = {"missing": str(error)}
    print("ANSWER " + json.dumps(reply))
