"""Which change of layout or block size would make the reads of a pair fewer or faster, found by planning."""

from __future__ import annotations

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


Options = dict[str, str | int]


class OptionChange(NamedTuple):
    """Other options for one or both engines."""

    decode: Options
    prefill: Options

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


def advise(explanation: Explanation) -> str:
    """Return which change is predicted to gain most, and how much, or why there is none; "" if refused.

    Layouts with one page for all layers come beside the rest: not every attention kernel can have them.
    Where the model says which ones its kernels take, only those are tried.
    """
    if explanation.refused:
        return ""
    if explanation.prefill.deployment is None and explanation.decode.deployment is None:
        return "none: other layouts can be tried for engines that are described by a preset or a model"
    if len(explanation.ranks) > MAX_DECODE_RANKS:
        return f"none: other layouts are tried for at most {MAX_DECODE_RANKS} decode ranks"
    sides = explanation.decode.deployment, explanation.prefill.deployment
    within_layers = _best(explanation, explanation, _changes(*sides))
    reached = explanation if within_layers is None else within_layers.explanation
    cross_layer = _best(explanation, reached, _cross_layer_changes(*sides))
    found = [tried for tried in (within_layers, cross_layer) if tried is not None]
    if not found:
        return (
            "nothing to change: no other order of heads, tokens and layers, and no block size of the other "
            f"side, is predicted to be faster over {explanation.link} by a fifth, or has half as many runs"
        )
    advice = "; or ".join(_sentence(explanation, tried) for tried in found)
    has_layout = any("layout" in options for tried in found for options in tried.change)
    return f"{advice}. {_VLLM_SETTING}" if has_layout else advice


def _sentence(explanation: Explanation, best: _Tried) -> str:
    before, after = explanation.num_runs, best.explanation.num_runs
    gain = "the bytes that are wanted lie closer together"
    if before >= MIN_TIME_GAIN * after:
        times = f"{before / after:,.0f}" if before >= 10 * after else f"{before / after:.1f}"
        gain = f"{times.removesuffix('.0')} times fewer reads ({before:,} runs become {after:,})"
    now, then = format_time(explanation.predicted_s), format_time(best.explanation.predicted_s)
    return (
        f"with {best.change}: {gain}; 1,000 tokens over {explanation.link} are predicted to take {then} in "
        f"place of {now}"
    )


def _best(explanation: Explanation, reached: Explanation, changes: Iterable[OptionChange]) -> _Tried | None:
    """Return the change that gains most over `reached`; one of more options has to be worth it."""
    best: _Tried | None = None
    for change in sorted(changes, key=lambda one: one.num_options):
        try:
            tried = explain_pair(
                _variant(explanation.prefill, change.prefill),
                _variant(explanation.decode, change.decode),
                explanation.link,
            )
        except (ValueError, KvxferdError):
            continue
        if tried.refused or not _is_worth(reached, tried):
            continue
        if best is None or (
            _is_worth(best.explanation, tried)
            if change.num_options > best.change.num_options
            else _cost(tried) < _cost(best.explanation)
        ):
            best = _Tried(change, tried)
    return best


def _variant(engine: EngineDescription, options: Options) -> EngineDescription:
    """Return the engine with other options. Raises ValueError or KvxferdError where it cannot have them."""
    if not options:
        return engine
    assert engine.deployment is not None
    changed = engine.deployment.with_options(options)
    if "layout" in options and not changed.takes_its_layout:
        raise ValueError(f"the model's kernels do not take {changed.options.layout}")
    return EngineDescription(engine.label, changed.ranks(), changed)


def _is_worth(before: Explanation, after: Explanation) -> bool:
    """Whether reads are faster, or fewer and not slower."""
    if before.predicted_s >= MIN_TIME_GAIN * after.predicted_s:
        return True
    return before.predicted_s >= after.predicted_s and before.num_runs >= MIN_RUN_GAIN * after.num_runs


def _cost(explanation: Explanation) -> tuple[float, int]:
    return explanation.predicted_s, explanation.num_runs


def _changes(decode: Deployment | None, prefill: Deployment | None) -> Iterator[OptionChange]:
    """Yield each combination of one or two changed options, or of the same layout for both."""
    of_decode, of_prefill = list(_options(decode, prefill)), list(_options(prefill, decode))
    yield from (OptionChange(options, {}) for options in of_decode)
    yield from (OptionChange({}, options) for options in of_prefill)
    for mine in of_decode:
        yield from (OptionChange(mine, theirs) for theirs in of_prefill if len(mine) == len(theirs) == 1)


def _options(mine: Deployment | None, other: Deployment | None) -> Iterator[Options]:
    """Yield other options for one engine: its heads and tokens in the other order, and the other's blocks."""
    if mine is None:
        return
    layout = _with_arrangement(mine.options, _swapped(mine.options.arrangement))
    yield layout
    if other is not None and other.options.block_tokens != mine.options.block_tokens:
        yield {"block_tokens": other.options.block_tokens}
        yield layout | {"block_tokens": other.options.block_tokens}


def _cross_layer_changes(decode: Deployment | None, prefill: Deployment | None) -> Iterator[OptionChange]:
    """Yield layouts that have all layers of a block in one page, for both sides: one alone gains nothing.

    Beside the usual ones, those that a side has, and the default of a model whose kernels take only some.
    """
    if prefill is None or decode is None:
        return
    names = [name for side in (decode, prefill) for name in (side.options.layout, side.model.default_layout)]
    for layout in dict.fromkeys((*names, *CROSS_LAYER_LAYOUTS)):
        tried = DeploymentOptions(layout=layout)
        if tried.has_cross_layer_pages:
            of_both = (_with_arrangement(side.options, tried.arrangement) for side in (decode, prefill))
            yield OptionChange(*of_both)


def _with_arrangement(options: DeploymentOptions, arrangement: str) -> Options:
    """Return the option that changes an engine's arrangement; none where it is that one already."""
    _, plus, conv = options.layout.partition("+")
    return {} if options.arrangement == arrangement else {"layout": f"{arrangement}{plus}{conv}"}


def _swapped(arrangement: str) -> str:
    """Return the arrangement with heads and tokens in the other order; HND for one of its own kind."""
    for order, other in (("HN", "NH"), ("NH", "HN")):
        if order in arrangement:
            return arrangement.replace(order, other, 1)
    return "HND"


def _words(options: Options) -> str:
    texts = [str(options["layout"])] if "layout" in options else []
    if "block_tokens" in options:
        texts.append(f"blocks of {options['block_tokens']} tokens")
    return " and ".join(texts)
