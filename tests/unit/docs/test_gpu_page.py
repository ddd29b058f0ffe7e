"""Figures and placements of docs/how-to/vllm-gpu.md are those of the code."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

from click.testing import CliRunner

from kvxferd.cli.root import root
from kvxferd.integrations.vllm.gpu_placement import GpuPlacement, placements_for
from kvxferd.integrations.vllm.options import read_options
from tests.support.repository import ROOT

PAGE = ROOT / "docs" / "how-to" / "vllm-gpu.md"
TEXT = " ".join(PAGE.read_text().split())


def test_the_placements_are_those_of_the_setting() -> None:
    section = PAGE.read_text().partition("\n## Placements\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
    assert rows == [placement.value for placement in GpuPlacement]
    assert read_options({}).gpu_placement == "auto"
    for placement in rows:
        assert f'`"gpu_placement": "{placement}"`' in section
        assert placements_for(read_options({"gpu_placement": placement}).gpu_placement) == (placement,)


@cache
def bytes_of(model: str, tp: int) -> dict[str, Any]:
    """Return what `kvxferd explain` reports of two equal engines over a card of 400 Gbit/s."""
    engine = f"{model},tp={tp}"
    done = CliRunner().invoke(root, ["explain", engine, engine, "--link", "400g", "--json"])
    assert done.exit_code == 0, done.output
    return dict(json.loads(done.stdout))


def test_bytes_of_a_token() -> None:
    rows = re.findall(r"^\| (`[\w.-]+` \| [\d,]+ \|.*) \|$", PAGE.read_text(), re.MULTILINE)
    assert rows
    for row in rows:
        model, of_token, of_rank, rate, time = (cell.strip(" `") for cell in row.split("|"))
        found = bytes_of(model, 4)
        (for_rank,) = {rank["bytes_per_1000_tokens"] for rank in found["ranks"]}
        assert int(of_token.replace(",", "")) * 1000 == found["bytes_per_1000_tokens"], model
        assert int(of_rank.replace(",", "")) * 1000 == for_rank, model
        assert rate == f"{10_000 * found['bytes_per_1000_tokens'] / 1000 / 1e9:.2f} GB/s"
        assert time == f"{sum(read['predicted_ms'] for read in found['ranks'][0]['reads']):.1f} ms"
    at_tp_8 = bytes_of("deepseek-v3", 8)["bytes_per_1000_tokens"] // 1000
    assert f"at TP 8 a token costs {at_tp_8:,} bytes" in TEXT
