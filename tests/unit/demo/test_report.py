"""The demo's report: the pair that was asked for beside equal engines, and why they differ."""

from __future__ import annotations

import io
import json

import pytest
from click.testing import CliRunner
from rich.console import Console

from kvxferd.cli.root import root
from kvxferd.core.snapshot import PullRecord
from kvxferd.demo import protocol, runner
from kvxferd.demo.report import describe_difference, render_report
from kvxferd.demo.results import DemoResults
from kvxferd.demo.shape import DemoShape, EngineShape
from kvxferd.ids import EngineId, PullId, TransferId

SHAPE = DemoShape(
    prefill=EngineShape(4, 2, 16, "HND"),
    decode=EngineShape(2, 1, 32, "NHD"),
    heads=8,
    head_dim=128,
    layers=2,
    requests=1,
    tokens=64,
)


def results_of(shape: DemoShape, runs: int, covering: int, wrong: int = 0) -> DemoResults:
    """One request, a second for each pull of 1 MB."""
    results = DemoResults(shape)
    results.add_request(
        {
            rank: protocol.PullResult(
                delivered=True,
                code="",
                message="",
                bytes=1_000_000,
                runs=runs,
                elapsed_s=1.0,
                checked_items=10,
                wrong_items=wrong,
                spilled_bytes=0,
                first_wrong="",
            )
            for rank in shape.ranks("decode")
        }
    )
    results.add_records(
        [
            PullRecord(
                pull=PullId(number),
                transfer_id=TransferId("t"),
                source=EngineId("p"),
                sink=EngineId("d"),
                rank=rank,
                outcome="delivered",
                code=None,
                message="",
                bytes=1_000_000,
                runs=runs,
                total_s=1.0,
                phases_s={},
                ways={"direct": 1_000_000 - covering, "covering": covering},
            )
            for number, rank in enumerate(shape.ranks("decode"))
        ]
    )
    return results


def printed(results: DemoResults, equal: DemoResults | None = None) -> str:
    out = io.StringIO()
    Console(file=out, width=150).print(render_report(results, equal))
    return " ".join(out.getvalue().split())


def test_an_equal_pair_has_the_decode_engine_twice() -> None:
    assert SHAPE.equal.prefill == SHAPE.equal.decode == SHAPE.decode
    assert SHAPE.equal.differences() == []
    assert SHAPE.differences() == [
        "the order of heads and tokens",
        "the block size",
        "the tensor-parallel size",
        "the pipeline stages",
    ]


def test_why_they_differ_names_runs_and_ways() -> None:
    """3,906 runs of 256 bytes against 31 of 32 KB."""
    text = describe_difference(results_of(SHAPE, 3906, 750_000), results_of(SHAPE.equal, 31, 0))
    assert "in the order of heads and tokens, the block size" in text
    assert "256 B on average lie together" in text
    assert "31.5 KiB between equal engines" in text
    assert "75% of the bytes were read in longer stretches" in text


def test_direct_reads_are_called_so() -> None:
    assert "read one by one (mover.read)" in describe_difference(
        results_of(SHAPE, 3906, 0), results_of(SHAPE.equal, 31, 0)
    )


def test_both_pairs_stand_side_by_side() -> None:
    text = printed(results_of(SHAPE, 3906, 1_000_000), results_of(SHAPE.equal, 31, 0))
    assert "these engines" in text
    assert text.endswith("every byte is right")
    assert "why they differ" in text
    assert "equal engines" not in printed(results_of(SHAPE, 3906, 0))


def test_wrong_bytes_between_equal_engines_are_no_success() -> None:
    text = printed(results_of(SHAPE, 3906, 0), results_of(SHAPE.equal, 31, 0, wrong=1))
    assert "FAILED" in text
    assert "why they differ" not in text


@pytest.mark.parametrize(
    ("flags", "shapes"),
    [
        ((), 2),
        (("--requests", "2", "--layers", "4"), 2),
        (("--prefill-tp", "4"), 1),  # even if it is the default
        (("--decode-layout", "HND"), 1),
    ],
)
def test_equal_engines_run_unless_an_engine_is_described(
    monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], shapes: int
) -> None:
    ran: list[DemoShape] = []

    def run_demo(shape: DemoShape, on_request: object, damage: str = "") -> DemoResults:
        ran.append(shape)
        results = DemoResults(shape)
        for _ in range(shape.requests):
            one = results_of(shape, 3906, 0)
            results.requests += 1
            results.pulls, results.delivered = results.pulls + one.pulls, results.delivered + one.delivered
        return results

    monkeypatch.setattr(runner, "run_demo", run_demo)
    said = CliRunner().invoke(root, ["demo", "--json", *flags])
    assert said.exit_code == 0, said.output
    found = json.loads(said.stdout)
    assert len(ran) == shapes
    assert found["prefill"] == str(ran[0].prefill)
    assert ("equal" in found) is (shapes == 2)
    if shapes == 2:
        assert found["equal"]["prefill"] == found["equal"]["decode"] == found["decode"]
        assert set(found["equal"]) == set(found) - {"equal", "json_version"}
