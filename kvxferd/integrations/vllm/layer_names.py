"""Which layer of the whole model a name of vLLM's means."""

from __future__ import annotations

from typing import NamedTuple

from kvxferd.integrations.vllm.facts import WorkerFacts
from kvxferd.integrations.vllm.refusal import layer_error

# A draft that is a model of its own numbers its layers from 0, and so do some models' own drafts (the
# MTP of Qwen3-Next, Qwen3.5, EXAONE, Nemotron-H). All others go on where the model ends.
_DRAFTS_FROM_ZERO = ("draft_model.", "mtp.")


class LayerKey(NamedTuple):
    """A cache's layer, and what tells it from other caches of the same kind in that layer."""

    layer: int
    suffix: str

    def component(self, name: str) -> str:
        """Return the component's name in this place."""
        return name + self.suffix


def layer_key_of(name: str, worker: WorkerFacts) -> LayerKey:
    """Return where a layer's cache stands in the whole model. Raises LayoutError.

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
