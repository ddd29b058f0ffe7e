"""The layer of the whole model that one of vLLM's layer names stands for."""

from __future__ import annotations

from typing import NamedTuple

from kvxferd.integrations.vllm.facts import WorkerFacts, layer_error

# A draft that is a model of its own numbers its layers from 0, and so do some models' own drafts (the
# MTP of Qwen3-Next, Qwen3.5, EXAONE, Nemotron-H). All others continue after the model's last layer.
_DRAFTS_FROM_ZERO = ("draft_model.", "mtp.")


class LayerKey(NamedTuple):
    """A cache's layer, and a suffix that distinguishes caches of the same kind in one layer."""

    layer: int
    suffix: str

    def component(self, name: str) -> str:
        """Return the component's name with this key's suffix."""
        return name + self.suffix


def layer_key_of(name: str, worker: WorkerFacts) -> LayerKey:
    """Return the layer and suffix of a cache. Raises LayoutError for a name without a layer's number.

    The first number in a name is the layer, counted over all pipeline stages; layers of a draft
    follow the model's. A second number (two attentions in one layer) becomes a suffix.
    """
    numbers = [int(part) for part in name.split(".") if part.isdigit()]
    if not numbers:
        raise layer_error(name, "its name has no layer number")
    layer = numbers[0]
    if name.startswith(_DRAFTS_FROM_ZERO):
        layer += worker.num_model_layers
    if layer not in worker.stage:
        raise layer_error(
            name,
            f"layer {layer} is none of this rank's, [{worker.stage.start}, {worker.stage.stop}) "
            f"of {worker.num_layers} ({worker.num_draft_layers} of them a draft's)",
        )
    return LayerKey(layer, "".join(f".{number}" for number in numbers[1:]))


def is_draft(layer: int, worker: WorkerFacts) -> bool:
    """Whether a layer belongs to the draft model."""
    return layer >= worker.num_model_layers
