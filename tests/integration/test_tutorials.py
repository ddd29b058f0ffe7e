"""The tutorials' programs, as they stand on their pages, against a real daemon."""

from __future__ import annotations

import gc
import importlib.util
import re
import weakref
from pathlib import Path

import msgspec
import pytest

from kvxferd import engine as kv
from kvxferd.errors import EngineError, LayoutError
from kvxferd.layout import EngineSpec, NamedTensor, from_tensors
from kvxferd.memory import share
from tests.support.documented_commands import blocks_of
from tests.support.nodes.fleet import Fleet
from tests.support.nodes.waiting import wait_until
from tests.support.repository import ROOT
from tests.support.tutorial_program import PAGE, run

DIMS = "kv block token head head_dim"
ENGINE_PAGE = ROOT / "docs" / "how-to" / "write-an-engine.md"

needs_library = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="no transfer library")


def without_times(output: str) -> str:
    return re.sub(r"(wire_s|runs)=[0-9.e-]+", r"\1=", output)


def test_the_tensor_tutorial_works_as_pasted(fleet: Fleet, tmp_path: Path) -> None:
    (program,) = blocks_of(PAGE, "python")
    assert program.count("\n") < 70
    daemon = fleet.shared("node")
    printed = run(program, daemon.worker_socket, tmp_path)
    (shown,) = [block for block in blocks_of(PAGE, "console") if "engine.py" in block]
    assert without_times(shown).partition("\n")[2] == without_times(printed)


@pytest.mark.parametrize("number", [0, 1], ids=["polled", "asyncio"])
def test_an_engine_of_your_own_works_as_pasted(fleet: Fleet, tmp_path: Path, number: int) -> None:
    program = blocks_of(ENGINE_PAGE, "python")[number]
    shown = blocks_of(ENGINE_PAGE, "console")[number]
    assert shown.partition("\n")[2] == run(program, fleet.shared("node").worker_socket, tmp_path)


def sleep(rank: kv.RankHandle) -> None:
    rank.suspend()
    wait_until(lambda: rank.is_suspended, "suspended")


class TestRegister:
    """`kvxferd.engine.register`, with a daemon."""

    SPEC = kv.EngineSpec("e", "g", 1, num_kv_heads=8)

    def test_adopted_memory_is_found_again_to_resume(self, fleet: Fleet) -> None:
        torch = pytest.importorskip("torch")
        # So large that malloc maps it for itself, whatever the heap of this process has free.
        cache = torch.zeros(2, 10_240, 16, 8, 64, dtype=torch.bfloat16)
        named = {"cache": kv.NamedTensor(tensor=cache, dims=DIMS)}
        socket = fleet.shared("node").worker_socket
        with kv.register(socket, self.SPEC, named, placements=["adopted"]) as rank:
            assert not rank.is_resident
            sleep(rank)
            kv.resume(rank, named)
            assert rank.is_connected
        with pytest.raises(EngineError, match="of another origin"):  # its descriptor is closed
            share(cache, ["memfd"])

    @needs_library
    def test_what_no_other_process_can_map_gets_a_mover_here(self, fleet: Fleet) -> None:
        torch = pytest.importorskip("torch")
        named = {"cache": kv.NamedTensor(tensor=torch.zeros(2, 4, 16, 8, 64), dims=DIMS)}
        with kv.register(fleet.shared("node").worker_socket, self.SPEC, named) as rank:
            assert rank.is_resident
            sleep(rank)
            assert rank.is_resident
            freed = weakref.ref(named["cache"].tensor)
            named = {"cache": kv.NamedTensor(tensor=torch.zeros(2, 4, 16, 8, 64), dims=DIMS)}
            gc.collect()
            assert freed() is None, "what sleeps is freed"
            kv.resume(rank, named)
            assert rank.is_connected

    @needs_library
    def test_it_resumes_wherever_the_tensors_are_now_and_only_as_they_were_laid_out(
        self, fleet: Fleet
    ) -> None:
        torch = pytest.importorskip("torch")
        socket = fleet.shared("node").worker_socket
        place = torch.arange(1 << 20, dtype=torch.uint8)

        def at(offset: int, name: str = "cache") -> dict[str, kv.NamedTensor]:
            cache = kv.strided(place.data_ptr() + offset, (2, 4, 16, 8, 64), "bfloat16")
            return {name: kv.NamedTensor(tensor=cache, dims=DIMS)}

        read = torch.zeros(2, 4, 16, 8, 64, dtype=torch.bfloat16)
        reader = msgspec.structs.replace(self.SPEC, engine_id="reader")
        tensors = {"cache": kv.NamedTensor(tensor=read, dims=DIMS)}
        with (
            kv.register(socket, self.SPEC, at(64), placements=["resident"]) as rank,
            kv.register(socket, reader, tensors, placements=["resident"]) as other,
        ):
            sleep(rank)
            with pytest.raises(LayoutError, match="are not laid out as at `register`"):
                kv.resume(rank, at(64, "renamed"))
            moved = 3_000  # another place in its page
            kv.resume(rank, at(moved))
            blocks = {"full": kv.BlockList(ids=range(4))}
            ref = rank.publish("moved", blocks, num_tokens=64)
            ticket = other.pull(ref, blocks, 64, deadline_s=30)
            wait_until(lambda: bool(other.poll()) or ticket.delivered is not None, "delivered")
            assert ticket.delivered
            assert torch.equal(read.view(torch.uint8).ravel(), place[moved : moved + read.nbytes])


def test_the_refusal_on_the_page_is_the_one_that_comes() -> None:
    torch = pytest.importorskip("torch")
    expanded = torch.zeros(4, 2, 16, 16, 1, 64).expand(4, 2, 16, 16, 8, 64)
    named = NamedTensor(tensor=expanded, dims="layer kv block token head head_dim")
    with pytest.raises(LayoutError) as refused:
        from_tensors(EngineSpec("e", "g", 4, num_kv_heads=8), {"cache": named})
    assert refused.value.message in " ".join(PAGE.read_text().split())
