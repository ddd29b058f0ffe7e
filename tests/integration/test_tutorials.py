"""The tutorials' programs, as they stand on their pages, against a real daemon."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvxferd.errors import LayoutError
from kvxferd.layout import EngineSpec, NamedTensor, from_tensors
from tests.support.documented_commands import blocks_of
from tests.support.nodes.fleet import Fleet
from tests.support.tutorial_program import PAGE, run


def without_times(output: str) -> str:
    return re.sub(r"(wire_s|runs)=[0-9.e-]+", r"\1=", output)


def test_the_tensor_tutorial_works_as_pasted(fleet: Fleet, tmp_path: Path) -> None:
    (program,) = blocks_of(PAGE, "python")
    assert program.count("\n") < 70
    daemon = fleet.shared("node")
    printed = run(program, daemon.worker_socket, tmp_path)
    (shown,) = [block for block in blocks_of(PAGE, "console") if "engine.py" in block]
    assert without_times(shown).partition("\n")[2] == without_times(printed)


def test_the_refusal_on_the_page_is_the_one_that_comes() -> None:
    torch = pytest.importorskip("torch")
    expanded = torch.zeros(4, 2, 16, 16, 1, 64).expand(4, 2, 16, 16, 8, 64)
    named = NamedTensor(tensor=expanded, dims="layer kv block token head head_dim")
    with pytest.raises(LayoutError) as refused:
        from_tensors(EngineSpec("e", "g", 4, num_kv_heads=8), {"cache": named})
    assert refused.value.message in " ".join(PAGE.read_text().split())
