"""Engines of one model have one fingerprint, whatever they call it; others have another."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvxferd.errors import EngineError
from kvxferd.integrations.vllm.identity import engine_spec, model_fingerprint, start_generation
from kvxferd.layout import EngineSpec
from tests.support import vllm_specs

CONFIG = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "rope_theta": 10000.0}


def save(weights: dict[str, torch.Tensor], file: Path) -> None:
    """Write a safetensors file: the table's length, the table, the bytes of the tensors."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    content = b""
    for name, weight in weights.items():
        piece = weight.numpy().tobytes()
        places = [len(content), len(content) + len(piece)]
        table[name] = {"dtype": "F32", "shape": list(weight.shape), "data_offsets": places}
        content += piece
    header = json.dumps(table).encode()
    file.write_bytes(struct.pack("<Q", len(header)) + header + content)


def checkpoint(folder: Path, *, seed: int = 0, **config: Any) -> Path:
    """Write a checkpoint of two files, as large models have."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    generator = torch.Generator().manual_seed(seed)
    names = {}
    for number in range(2):
        file = f"model-0000{number + 1}-of-00002.safetensors"
        weights = {f"layers.{number}.{n}": torch.randn(64, 64, generator=generator) for n in ("q", "k")}
        save(weights, folder / file)
        names |= dict.fromkeys(weights, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return folder


def vllm_config(path: Path | str, **more: Any) -> Any:
    """Return the attributes of a VllmConfig that are read."""
    config = vllm_specs.vllm_config(num_layers=2)
    config.kv_transfer_config.engine_id = "deployment_dp1"
    vars(config.model_config).update(
        model=str(path),
        revision=None,
        architectures=["LlamaForCausalLM"],
        dtype=torch.bfloat16,
        quantization=None,
        load_format="auto",
        hf_overrides={},
        hf_config=SimpleNamespace(to_dict=lambda: dict(CONFIG)),
    )
    vars(config.model_config).update(more)
    return config


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return checkpoint(tmp_path / "model")


def test_one_model_has_one_fingerprint(model: Path, tmp_path: Path) -> None:
    """Wherever it lies, and whatever its configuration's file says of itself."""
    found = model_fingerprint(vllm_config(model, quantization="awq_marlin"))
    assert found.startswith("LlamaForCausalLM/bfloat16/awq/"), "an operator can compare it"
    assert len(found) < 100
    of_itself = {"transformers_version": "4.99", "_name_or_path": "/home/me", "dtype": "x"}
    elsewhere = checkpoint(tmp_path / "elsewhere", **of_itself)
    assert model_fingerprint(vllm_config(elsewhere, quantization="awq_marlin")) == found
    one, same, other = (model_fingerprint(vllm_config(name)) for name in ("org/a", "org/a", "org/b"))
    assert one == same != other, "without files the name decides"


def test_a_name_is_looked_up_in_the_hubs_cache(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    hub = tmp_path / "hub"
    snapshot = hub / "models--org--name" / "snapshots" / ("0" * 40)
    shutil.copytree(model, snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(hub))
    assert model_fingerprint(vllm_config("org/name")) == model_fingerprint(vllm_config(model))


def test_weights_that_are_streamed_are_named_by_their_store(model: Path, tmp_path: Path) -> None:
    homes = [tmp_path / "home-a" / "3f2a", tmp_path / "home-b" / "3f2a"]
    for home in homes:
        home.mkdir(parents=True)
        shutil.copy(model / "config.json", home)
    here, there = (model_fingerprint(vllm_config(h, model_weights="s3://models/a")) for h in homes)
    assert here == there != model_fingerprint(vllm_config(homes[0], model_weights="s3://models/b"))


@pytest.mark.parametrize(
    ("change", "more", "retrained"),
    [
        ({"seed": 1}, {}, None),  # fine-tuned: other weights in the same shapes
        ({"rope_theta": 500000.0}, {}, None),
        ({}, {"dtype": torch.float16}, None),
        ({}, {"quantization": "fp8"}, None),
        ({}, {"hf_overrides": {"rope_theta": 500000.0}}, None),
        ({}, {"load_format": "dummy"}, None),  # weights that are not loaded do not count
        ({}, {}, slice(-64 * 64 * 2 - 32, -64 * 64 * 2 + 32)),  # the middle of the last tensor
    ],
)
def test_another_model_has_another_fingerprint(
    model: Path, tmp_path: Path, change: dict[str, Any], more: dict[str, Any], retrained: slice | None
) -> None:
    other = checkpoint(tmp_path / "other", **change)
    if retrained is not None:
        file = other / "model-00002-of-00002.safetensors"
        content = bytearray(file.read_bytes())
        content[retrained] = bytes(64)
        file.write_bytes(content)
    assert model_fingerprint(vllm_config(model)) != model_fingerprint(vllm_config(other, **more))


def spec_of(config: Any, *, tp_rank: int = 0, pp_rank: int = 0) -> EngineSpec:
    place = {"tp_rank": tp_rank, "pp_rank": pp_rank, "generation": "g", "home": "tcp://home:1"}
    return engine_spec(config, **place, fingerprint="f", publish_implies_ready=False)


def test_the_place_of_a_rank(model: Path) -> None:
    spec = spec_of(vllm_config(model), tp_rank=3, pp_rank=1)
    assert (spec.engine_id, spec.generation, spec.home) == ("deployment_dp1", "g", "tcp://home:1")
    assert (spec.pp_size, spec.tp_size, spec.pp_rank, spec.tp_rank) == (2, 4, 1, 3)
    assert (spec.num_layers, spec.num_kv_heads, spec.fingerprint) == (2, 8, "f")
    assert not spec.publish_implies_ready


def test_a_draft_counts_behind_the_model(model: Path) -> None:
    config = vllm_config(model)
    draft = vllm_config("org/draft", get_total_num_hidden_layers=lambda: 1).model_config
    config.speculative_config = SimpleNamespace(draft_model_config=draft, method="eagle")
    assert "+eagle:LlamaForCausalLM/" in model_fingerprint(config)
    assert spec_of(config).num_layers == 3


def test_a_start_has_the_generation_of_its_name() -> None:
    """The scheduler and the workers read it from the same configuration."""
    first, other = (start_generation(SimpleNamespace(instance_id=name)) for name in ("1700", "1701"))
    assert first == start_generation(SimpleNamespace(instance_id="1700")) != other
    with pytest.raises(EngineError, match="does not name its starts"):
        start_generation(SimpleNamespace())


@pytest.mark.parametrize("method", ["ngram", "ngram_gpu", "suffix", "custom_class", "medusa"])
def test_drafting_that_caches_nothing_changes_no_identity(model: Path, method: str) -> None:
    """A decode engine that guesses from the prompt reads from a prefill engine that does not guess."""
    config = vllm_config(model)
    plain = model_fingerprint(config)
    config.speculative_config = SimpleNamespace(draft_model_config=config.model_config, method=method)
    assert model_fingerprint(config) == plain
    assert spec_of(config).num_layers == 2
