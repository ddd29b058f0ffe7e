"""A digest of a model's configuration and of samples of its weights, independent of its name.

One engine may be given a name, another a path, a third a path elsewhere; fine-tuned models have equal
configurations. So the digest has a few bytes of every weight, found by the files' own tables.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

# Each tensor is sampled in the middle. A model of 100,000 tensors takes a second from a page cache.
_SAMPLE_BYTES = 64
_MAX_HEADER_BYTES = 100 << 20  # safetensors' own limit
_INDEX = "model.safetensors.index.json"
# Keys that describe the configuration's file, not the model.
_VOLATILE = frozenset({"_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache"})


class Model(NamedTuple):
    """A model as an engine was given it."""

    name: str  # a folder, or a name in the hub
    revision: str | None
    configuration: Callable[[], Mapping[str, Any]]  # where this machine has no config.json of it
    overrides: Any = None  # the operator's, of the configuration; other than a mapping: none
    loads_files: bool = True  # whether the weights are those of the model's files
    weights: str = ""  # the name of weights that are streamed from a store; `name` is then a local folder


def fingerprint_of_model(
    model: Model, architectures: Sequence[str] | None, dtype: object, quantisation: object
) -> str:
    """Return a text that is equal for two engines whose caches of this model hold the same values."""
    architecture = (architectures or ["unnamed"])[0]
    # The suffix names the kernel that runs a quantisation, which depends on the device.
    packing = str(quantisation or "plain").removesuffix("_marlin")
    return f"{architecture}/{str(dtype).removeprefix('torch.')}/{packing}/{digest_of_model(model)}"


def digest_of_model(model: Model) -> str:
    """Return 16 hex digits: equal for equal configuration and weights.

    Where this machine has no weights as safetensors, the model's name and revision replace them.
    """
    digest = hashlib.blake2b(digest_size=8)
    folder = _folder(model.name, model.revision)
    digest.update(json.dumps(_configuration(folder, model), sort_keys=True, default=str).encode())
    files = _weight_files(folder) if folder is not None and model.loads_files else []
    if not files:
        digest.update(f"{model.weights or model.name}@{model.revision}".encode())
    for file in files:
        for sample in _samples(file):
            digest.update(sample)
    return digest.hexdigest()


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


def _configuration(folder: Path | None, model: Model) -> Mapping[str, Any]:
    """Return the configuration in the model's file, with the operator's overrides."""
    content: Mapping[str, Any]
    if folder is not None and (folder / "config.json").is_file():
        content = json.loads((folder / "config.json").read_text())
    else:
        content = model.configuration()
    kept = {name: value for name, value in content.items() if name not in _VOLATILE}
    return {"config": kept, "overrides": model.overrides if isinstance(model.overrides, Mapping) else {}}


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
