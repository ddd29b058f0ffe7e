"""What `kvxferd explain` reckons, against arithmetic that knows nothing of plans."""

from __future__ import annotations

import msgspec
import pytest

from kvxferd.explain.analysis import explain_pair
from kvxferd.explain.formatting import format_numbers, format_ranks, format_unit_ranges, format_units
from kvxferd.layout import UnitRange
from tests.support.explained_pairs import described, explained

LLAMA = 80 * 2 * 8 * 128 * 2 * 1000


@pytest.mark.parametrize(
    ("prefill", "decode", "want"),
    [
        ("llama-3-70b,tp=8,pp=2", "llama-3-70b,tp=4", LLAMA),
        ("llama-3-70b,tp=3,pp=3,block_tokens=12", "llama-3-70b,tp=5,layout=NHD", LLAMA),
        ("llama-3-70b,tp=2", "llama-3-70b,tp=16", 2 * LLAMA),  # decode holds every head twice
        ("llama-3-70b,tp=16", "llama-3-70b", LLAMA),  # prefill does: one copy is read
        ("llama-3-8b,tp=2,cp=2", "llama-3-8b,tp=1", 32 * 2 * 8 * 128 * 2 * 1000),
        ("deepseek-v3,tp=8", "deepseek-v3,tp=2", 2 * 61 * 576 * 2 * 1000),  # each rank holds all
        # full layers all tokens, sliding ones their last 128
        ("gpt-oss,tp=2", "gpt-oss,tp=4", 18 * 2 * 8 * 64 * 2 * (1000 + 127)),
        ("gemma-3,tp=2", "gemma-3,tp=4", 62 * 2 * 16 * 128 * 2 * 1000),  # the window is wider
        # attention per token, states once
        (
            "nemotron-h-8b,tp=4",
            "nemotron-h-8b,tp=2",
            4 * 2 * 8 * 128 * 2 * 1000 + 24 * (3 * 10240 * 2 + 128 * 64 * 128 * 2),
        ),
    ],
)
def test_bytes_of_a_thousand_tokens(prefill: str, decode: str, want: int) -> None:
    """Of all decode ranks together; what prefill ranks give is the same bytes."""
    found = explained(prefill, decode)
    assert found.num_bytes == want
    assert sum(load.num_bytes for load in found.loads()) == want


@pytest.mark.parametrize(
    ("prefill", "decode", "runs"),
    [
        ("qwen3-8b", "qwen3-8b", 62.5 * 36 * 2),  # 36 layers, K and V: a block of all eight heads
        ("qwen3-8b", "qwen3-8b,tp=2", 62.5 * 36 * 2 * 2),  # a block of four heads, for each rank
        ("qwen3-8b", "qwen3-8b,layout=NHD", 1000 * 36 * 2 * 8),  # head by head and token by token
        ("qwen3-8b,layout=HND-cross-layer", "qwen3-8b,layout=HND-cross-layer", 62.5),  # a block of all layers
    ],
)
def test_runs_of_a_thousand_tokens(prefill: str, decode: str, runs: float) -> None:
    found = explained(prefill, decode)
    reads = [read for rank in found.ranks for read in rank.reads]
    assert sum(read.num_runs for read in reads) == pytest.approx(runs, abs=len(reads))
    for read in reads:
        assert read.mean_run_bytes == pytest.approx(read.num_bytes / read.num_runs)


def test_replicas_are_spread_over_readers() -> None:
    """Each of four readers has a replica of the latent of its own; the rest gives nothing."""
    found = explained("deepseek-v3,tp=8", "deepseek-v3,tp=4")
    assert [[read.source for read in rank.reads] for rank in found.ranks] == [
        [(0, 0)],
        [(0, 2)],
        [(0, 4)],
        [(0, 6)],
    ]
    assert [load.rank.tp_rank for load in found.loads() if not load.readers] == [1, 3, 5, 7]
    assert format_ranks([load.rank for load in found.loads() if load.readers]) == "pp0.tp0+2+4+6"


def test_loads_of_uneven_heads() -> None:
    """Three ranks with 3, 3 and 2 of 8 heads, four readers of 2: 80 layers, K and V, 256 bytes a head."""
    head = 80 * 2 * 128 * 2 * 1000
    loads = explained("llama-3-70b,tp=3", "llama-3-70b,tp=4").loads()
    assert [(load.num_bytes, [rank.tp_rank for rank in load.readers]) for load in loads] == [
        (3 * head, [0, 1]),
        (3 * head, [1, 2]),
        (2 * head, [3]),
    ]


@pytest.mark.parametrize(
    ("prefill", "decode", "fields"),
    [
        ("llama-3-70b", "qwen3-8b", {"fingerprint": ("llama-3-70b", "qwen3-8b"), "num_layers": (80, 36)}),
        (
            "llama-3-8b,kv_dtype=fp8",
            "llama-3-8b",
            {"itemsize": (1, 2), "dtype": ("float8_e4m3fn", "bfloat16"), "content_bytes": (128, 256)},
        ),
        ("deepseek-v3", "deepseek-v3,kv_dtype=fp8", {"content_bytes": (1152, 576)}),
    ],
)
def test_refusals_name_fields_with_both_values(
    prefill: str, decode: str, fields: dict[str, tuple[object, object]]
) -> None:
    """Prefill's value first."""
    found = explain_pair(described(prefill), described(decode))
    assert not found.ranks
    refused = {refusal.field: (refusal.prefill, refusal.decode) for refusal in found.refused}
    for field, values in fields.items():
        assert refused[field] == values
    for refusal in found.refused:
        assert f"{refusal.prefill!r} at prefill and {refusal.decode!r} at decode" in refusal.message


def test_a_narrower_window_at_prefill_is_noted() -> None:
    """Possible for short requests only."""
    prefill, decode = described("gpt-oss"), described("gpt-oss")
    for engine, window in ((prefill, 64), (decode, 128)):
        for rank, (spec, layout) in dict(engine.ranks).items():
            groups = tuple(
                msgspec.structs.replace(group, sliding_window=window) if group.sliding_window else group
                for group in layout.groups
            )
            engine.ranks[rank] = (spec, msgspec.structs.replace(layout, groups=groups))  # type: ignore[index]
    notes = explain_pair(prefill, decode).notes
    assert any("prefill keeps the last 64 only" in note and "tokens-not-published" in note for note in notes)


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([], ""),
        ([7], "7"),
        ([7, 0, 2, 1, 3], "0-3, 7"),
        (range(0, 40, 4), "0, 4, ..., 36"),
        ([0, 1, 3, 4, 7, 9, 12], "7 of 0-12"),
    ],
)
def test_numbers_are_shown_as_ranges(numbers: list[int], text: str) -> None:
    assert format_numbers(numbers) == text


def test_a_rank_that_holds_countless_units_costs_its_reader_nothing() -> None:
    """A layout may have a billion units of one byte. Counted out they are 35 GB of an operator's memory."""
    countless = UnitRange(0, 1 << 62)
    assert format_unit_ranges((countless,)) == f"0-{(1 << 62) - 1}"
    assert format_units({"ssm": (countless,)}) == f"ssm 0-{(1 << 62) - 1}"
