"""Which change of layout or block size would make the reads of a pair fewer or faster, found by planning."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from kvxferd.errors import KvxferdError
from kvxferd.explain.analysis import Explanation, explain_pair
from kvxferd.explain.engine_spec_parser import Deployment, EngineDescription
from kvxferd.layout.presets import DeploymentOptions
from kvxferd.telemetry.units import format_time

# Each pair that is tried is planned as a whole, which takes 10 ms and more for a decode rank.
MAX_DECODE_RANKS = 32
# Less is within the error of the prediction.
MIN_TIME_GAIN = 1.2
# So many times fewer runs are worth a change that costs no time: a mover that reads directly gains as much.
MIN_RUN_GAIN = 2.0
# vLLM's layouts with all layers of a block in one page: equal engines read a block as one run. Where heads
# lie outside the layers, engines of unequal tensor parallelism read each head of a block as one.
CROSS_LAYER_LAYOUTS = ("BLHNC", "BHLNC")
_VLLM_SETTING = (
    "vLLM takes a layout from the connector's option kv_cache_layout, a preference, or from "
    "VLLM_KV_CACHE_LAYOUT, with which it does not start where the attention kernel cannot have it"
)


class OptionChange(NamedTuple):
    """Other options for one or both engines."""

    decode: dict[str, str | int]
    prefill: dict[str, str | int]

    @property
    def num_options(self) -> int:
        """The number of options that are changed."""
        return len(self.decode) + len(self.prefill)

    def __str__(self) -> str:
        if self.decode == self.prefill:
            return f"{_words(self.decode)} at both"
        sides = (("decode", self.decode), ("prefill", self.prefill))
        return " and ".join(f"{_words(options)} at {side}" for side, options in sides if options)


class _Tried(NamedTuple):
    change: OptionChange
    explanation: Explanation


def with_advice(explanation: Explanation) -> Explanation:
    """Return the explanation with a sentence of advice, unless the pair is refused."""
    if explanation.refused:
        return explanation
    return dataclasses.replace(explanation, advice=advise(explanation))


def advise(explanation: Explanation) -> str:
    """Return which change is predicted to gain most, and how much, or why there is none.

    Layouts with one page for all layers come beside the rest: not every attention kernel can have them.
    Where the model says which ones its kernels take, only those are tried.
    """
    if explanation.prefill.deployment is None and explanation.decode.deployment is None:
        return "none: other layouts can be tried for engines that are described by a preset or a model"
    if len(explanation.ranks) > MAX_DECODE_RANKS:
        return f"none: other layouts are tried for at most {MAX_DECODE_RANKS} decode ranks"
    within_layers = _best(explanation, _changes(explanation.prefill, explanation.decode))
    reached = explanation if within_layers is None else within_layers.explanation
    cross_layer = _best(explanation, _cross_layer_changes(explanation.prefill, explanation.decode), reached)
    found = [tried for tried in (within_layers, cross_layer) if tried is not None]
    if not found:
        return (
            "nothing to change: no other order of heads, tokens and layers, and no block size of the other "
            f"side, is predicted to be faster over {explanation.link} by a fifth, or has half as many runs"
        )
    advice = "; or ".join(_sentence(explanation, tried) for tried in found)
    has_layout = any("layout" in options for tried in found for options in tried.change)
    return f"{advice}. {_VLLM_SETTING}" if has_layout else advice


def variant(engine: EngineDescription, options: dict[str, str | int]) -> EngineDescription:
    """Return the engine with other options. Raises ValueError or KvxferdError where it cannot have them."""
    if not options:
        return engine
    assert engine.deployment is not None
    changed = engine.deployment.with_options(options)
    label = ",".join([engine.label, *(f"{name}={value}" for name, value in options.items())])
    return EngineDescription(label, changed.ranks(), changed)


def _sentence(explanation: Explanation, best: _Tried) -> str:
    before, after = explanation.num_runs, best.explanation.num_runs
    gain = "the bytes that are wanted lie closer together"
    if before >= MIN_TIME_GAIN * after:
        gain = f"{_times(before / after)} times fewer reads ({before:,} runs become {after:,})"
    now, then = format_time(explanation.predicted_s), format_time(best.explanation.predicted_s)
    return (
        f"with {best.change}: {gain}; 1,000 tokens over {explanation.link} are predicted to take {then} in "
        f"place of {now}{_in_a_row(explanation, best.explanation)}"
    )


def _in_a_row(before: Explanation, after: Explanation) -> str:
    """Return what is gained where blocks lie in a row, if that is more than what is gained where none do.

    The runs of equal layouts merge there. Between layouts that differ they do not, and the stretches of
    covering reads end with their block.
    """
    now, then = before.predicted_in_a_row_s, after.predicted_in_a_row_s
    gain_of_scattered = before.predicted_s / after.predicted_s
    if now < MIN_TIME_GAIN * then or now / then < MIN_TIME_GAIN * gain_of_scattered:
        return ""
    times = f"{format_time(then)} in place of {format_time(now)}"
    return f" where no blocks are neighbours, and {times} where they lie in a row"


def _times(ratio: float) -> str:
    return f"{ratio:,.0f}" if ratio >= 10 else f"{ratio:.1f}".removesuffix(".0")


def _best(
    explanation: Explanation, changes: Iterable[OptionChange], reached: Explanation | None = None
) -> _Tried | None:
    """Return the change that gains most; one of more options has to be worth it.

    A change has to be worth it after `reached`, which another one reaches already.
    """
    best: _Tried | None = None
    for change in sorted(changes, key=lambda one: one.num_options):
        try:
            tried = explain_pair(
                variant(explanation.prefill, change.prefill),
                variant(explanation.decode, change.decode),
                explanation.link,
            )
        except (ValueError, KvxferdError):
            continue
        if tried.refused or not _is_worth(reached or explanation, tried):
            continue
        if best is None or (
            _is_worth(best.explanation, tried)
            if change.num_options > best.change.num_options
            else _cost(tried) < _cost(best.explanation)
        ):
            best = _Tried(change, tried)
    return best


def _is_worth(before: Explanation, after: Explanation) -> bool:
    """Whether reads are faster, or fewer and not slower."""
    if before.predicted_s >= MIN_TIME_GAIN * after.predicted_s:
        return True
    return before.predicted_s >= after.predicted_s and before.num_runs >= MIN_RUN_GAIN * after.num_runs


def _cost(explanation: Explanation) -> tuple[float, int]:
    return explanation.predicted_s, explanation.num_runs


def _changes(prefill: EngineDescription, decode: EngineDescription) -> Iterator[OptionChange]:
    """Yield each combination of one or two changed options, or of the same layout for both."""
    of_decode = list(_options(decode.deployment, prefill.deployment))
    of_prefill = list(_options(prefill.deployment, decode.deployment))
    for options in of_decode:
        yield OptionChange(options, {})
    for options in of_prefill:
        yield OptionChange({}, options)
    for mine in of_decode:
        yield from (OptionChange(mine, theirs) for theirs in of_prefill if len(mine) == len(theirs) == 1)


def _cross_layer_changes(prefill: EngineDescription, decode: EngineDescription) -> Iterator[OptionChange]:
    """Yield layouts that have all layers of a block in one page, for both sides: one alone gains nothing.

    Beside the usual ones, those that a side has, and the default of a model whose kernels take only some.
    """
    if prefill.deployment is None or decode.deployment is None:
        return
    sides = (decode.deployment, prefill.deployment)
    defaults = (dataclasses.replace(side.options, layout=side.model.default_layout) for side in sides)
    of_a_side = [
        options.arrangement
        for options in (*(side.options for side in sides), *defaults)
        if options.has_cross_layer_pages
    ]
    for layout in dict.fromkeys((*of_a_side, *CROSS_LAYER_LAYOUTS)):
        of_decode, of_prefill = (_with_arrangement(side.options, layout) for side in sides)
        if _takes(sides[0], of_decode) and _takes(sides[1], of_prefill):
            yield OptionChange(of_decode, of_prefill)


def _takes(deployment: Deployment, options: dict[str, str | int]) -> bool:
    """Whether the kernels take the layout of some options; one that is not changed is taken as it is."""
    return "layout" not in options or deployment.takes_layout(str(options["layout"]))


def _with_arrangement(options: DeploymentOptions, arrangement: str) -> dict[str, str | int]:
    """Return the option that changes an engine's arrangement; none where it is that one already."""
    _, plus, conv = options.layout.partition("+")
    return {} if options.arrangement == arrangement else {"layout": f"{arrangement}{plus}{conv}"}


def _options(mine: Deployment | None, other: Deployment | None) -> Iterator[dict[str, str | int]]:
    """Yield other options for one engine: its heads and tokens in the other order, and the other's blocks."""
    if mine is None:
        return
    layout: dict[str, str | int] = {"layout": _swapped(mine.options.layout)}
    tokens: dict[str, str | int] = {}
    if other is not None and other.options.block_tokens != mine.options.block_tokens:
        tokens = {"block_tokens": other.options.block_tokens}
    for options in (layout, tokens, {**layout, **tokens} if tokens else {}):
        if options and _takes(mine, options):
            yield options


def _swapped(layout: str) -> str:
    """Return the layout with heads and tokens in the other order; HND for one of its own kind."""
    for order, other in (("HN", "NH"), ("NH", "HN")):
        if order in layout:
            return layout.replace(order, other, 1)
    arrangement, plus, conv = layout.partition("+")
    if arrangement in ("blocks-first", "cross-layer", "packed"):  # these mean the HND forms
        return f"NHD-{arrangement}{plus}{conv}"
    return "HND" + plus + conv


def _words(options: dict[str, str | int]) -> str:
    texts = []
    if "layout" in options:
        texts.append(str(options["layout"]))
    if "block_tokens" in options:
        texts.append(f"blocks of {options['block_tokens']} tokens")
    return " and ".join(texts)
