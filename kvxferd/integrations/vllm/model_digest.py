"""A digest of a model's configuration and of samples of its weights, independent of its name.

One engine may be given a name, another a path, a third a path elsewhere; fine-tuned models have equal
configurations. So the digest has a few bytes of every weight, found by the files' own tables.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

# Each tensor is sampled in the middle. A model of 100,000 tensors takes a second from a page cache.
_SAMPLE_BYTES = 64
_MAX_HEADER_BYTES = 100 << 20  # safetensors' own limit
_INDEX = "model.safetensors.index.json"
# Keys that describe the configuration's file, not the model.
_VOLATILE = frozenset({"_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache"})


def digest_of_model(model_config: Any) -> str:
    """Return 16 hex digits: equal for equal configuration and weights.

    Where this machine has no weights as safetensors, the model's name and revision replace them.
    """
    digest = hashlib.blake2b(digest_size=8)
    folder = _folder(str(model_config.model), model_config.revision)
    digest.update(json.dumps(_configuration(folder, model_config), sort_keys=True, default=str).encode())
    files = _weight_files(folder) if folder is not None and loads_weight_files(model_config) else []
    if not files:
        # `model_weights` names weights that are streamed from a store; `model` is then a local folder.
        name = getattr(model_config, "model_weights", "") or model_config.model
        digest.update(f"{name}@{model_config.revision}".encode())
    for file in files:
        for sample in _samples(file):
            digest.update(sample)
    return digest.hexdigest()


def loads_weight_files(model_config: Any) -> bool:
    """Whether the weights are loaded from the model's files."""
    return str(getattr(model_config, "load_format", "auto")) != "dummy"


def _folder(model: str, revision: str | None) -> Path | None:
    """Return the folder of a model's files on this machine: its path, or its snapshot in the hub's cache."""
    if os.path.isdir(model):
        return Path(model)
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    try:
        found = try_to_load_from_cache(model, "config.json", revision=revision)
    except ValueError:  # a name that no repository can have
        return None
    return Path(found).parent if isinstance(found, str) else None


def _configuration(folder: Path | None, model_config: Any) -> Mapping[str, Any]:
    """Return the configuration in the model's file, with the operator's overrides."""
    content: Mapping[str, Any]
    if folder is not None and (folder / "config.json").is_file():
        content = json.loads((folder / "config.json").read_text())
    else:
        content = model_config.hf_config.to_dict()
    overrides = getattr(model_config, "hf_overrides", None)
    kept = {name: value for name, value in content.items() if name not in _VOLATILE}
    return {"config": kept, "overrides": overrides if isinstance(overrides, Mapping) else {}}


def _weight_files(folder: Path) -> list[Path]:
    """Return the files that a loader reads, in order: those of the index, else all."""
    index = folder / _INDEX
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        files = [folder / name for name in names]
    else:
        files = sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("*.safetensors"))
    return files if all(file.is_file() for file in files) else []


def _samples(file: Path) -> Iterator[bytes]:
    """Yield the table of a safetensors file without its offsets, and a few bytes of every tensor."""
    with file.open("rb") as opened:
        (header_bytes,) = struct.unpack("<Q", opened.read(8))
        if header_bytes > _MAX_HEADER_BYTES:
            raise ValueError(f"cannot read {file}: a header of {header_bytes} bytes is no safetensors")
        table = json.loads(opened.read(header_bytes))
        table.pop("__metadata__", None)
        for name in sorted(table):
            start, end = table[name]["data_offsets"]
            yield f"{name}:{table[name]['dtype']}:{table[name]['shape']}".encode()
            middle = start + max(0, (end - start - _SAMPLE_BYTES) // 2)
            opened.seek(8 + header_bytes + middle)
            yield opened.read(min(_SAMPLE_BYTES, end - start))
