"""The demo's report: the pair that was asked for beside equal engines."""

from __future__ import annotations

import io
from contextlib import redirect_stdout

import click
import pytest

from kvxferd.cli.demo import demo, pairs_to_run
from kvxferd.demo.rank import RankResult
from kvxferd.demo.report import DemoResults, print_report
from kvxferd.layout.presets import LayerKind, ModelFacts, key_and_value
from kvxferd.tooling.content import ContentCheck
from kvxferd.tooling.engine_pair import EnginePair, EngineShape
from kvxferd.tooling.engine_process import Pulled

PAIR = EnginePair(
    model=ModelFacts("demo", 8, (LayerKind.FULL,) * 2, key_and_value(8, 128)),
    prefill=EngineShape(4, 2, 16, "HND"),
    decode=EngineShape(2, 1, 32, "NHD"),
    num_tokens=64,
    name="demo",
)
EQUAL = PAIR.equal("demo-equal")


def results_of(pair: EnginePair, runs: int, covering: int, wrong: int = 0, spilled: int = 0) -> DemoResults:
    """One request, a second for each pull of 1 MB."""
    results = DemoResults(pair, wanted=1)
    one = RankResult(1.0, Pulled(1.0, 1_000_000, runs, 0.5), "", ContentCheck(10, wrong, ""), spilled)
    results.add_request(dict.fromkeys(pair.engine("decode"), one))
    results.ways = {"direct": 1_000_000 - covering, "covering": covering}
    return results


def printed(results: DemoResults, equal: DemoResults | None = None) -> str:
    out = io.StringIO()
    with redirect_stdout(out):
        print_report(results, equal)
    return " ".join(out.getvalue().split())


def test_both_pairs_stand_side_by_side_and_each_has_to_be_right() -> None:
    ours = results_of(PAIR, 3906, 1_000_000)
    text = printed(ours, results_of(EQUAL, 31, 0))
    assert "THESE ENGINES EQUAL ENGINES" in text
    assert text.endswith("every byte is right")
    assert "covering" in text
    assert "EQUAL ENGINES" not in printed(results_of(PAIR, 3906, 0))
    assert "FAILED" in printed(ours, results_of(EQUAL, 31, 0, wrong=1))


def test_a_byte_outside_the_blocks_is_no_success_and_its_line_says_so() -> None:
    results = results_of(PAIR, 3906, 0, spilled=1)
    assert not results.is_ok
    assert results.describe_last() == "request 1 of 1: 1 s, FAILED"
    assert results_of(PAIR, 3906, 0).describe_last().endswith("every byte is right")


def test_a_pull_that_failed_is_counted_by_its_code() -> None:
    results = DemoResults(PAIR, wanted=1)
    failed = RankResult(2.0, None, "cannot pull [deadline]", ContentCheck(0, 0, ""), 0)
    results.add_request(dict.fromkeys(PAIR.engine("decode"), failed))
    assert (results.counts["pulls"], results.failed) == (2, 2)
    assert "request 0, " in results.first_failure
    assert not results.is_ok


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        ([], ["demo", "demo-equal"]),
        (["--requests", "2", "--layers", "4"], ["demo", "demo-equal"]),
        (["--prefill-tp", "4"], ["demo"]),  # even if it is the default
        (["--decode-layout", "HND"], ["demo"]),
    ],
)
def test_equal_engines_run_unless_an_engine_is_described(flags: list[str], names: list[str]) -> None:
    ctx: click.Context = demo.make_context("demo", flags)
    pairs = pairs_to_run(ctx, ctx.params)
    assert [pair.name for pair in pairs] == names
    assert pairs[0].prefill == EngineShape(4, 2, 16, "HND")
    if len(pairs) == 2:
        assert pairs[1].prefill == pairs[1].decode == pairs[0].decode
        assert pairs[1].model == pairs[0].model
