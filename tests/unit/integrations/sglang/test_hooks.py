"""What stands around SGLang's own functions, over objects that look as its requests and pools do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvxferd.integrations.sglang import hooks
from kvxferd.integrations.sglang.held import HeldRequests
from kvxferd.integrations.sglang.memory import in_sealed_memory, rows_of
from kvxferd.memory import MemoryPlacement, share_all


class Prefill:
    """An engine's manager, the request that it has, and what was given back of it."""

    def __init__(self, *, holds_pages: bool) -> None:
        self.given_back: list[object] = []
        self.is_released = False
        self.held = HeldRequests(lambda flags: flags)
        self.num_pumped = 0
        sender = SimpleNamespace(
            kv_mgr=self, holds_pages=holds_pages, publication=_Publication(self), clear=lambda: None
        )
        self.request = SimpleNamespace(disagg_kv_sender=sender)
        self.queue = SimpleNamespace(kv_manager=self)

    def pump(self) -> None:
        self.num_pumped += 1

    def release(self, request: Any) -> None:
        hooks.release_kv_cache(
            lambda req, tree, checkpoint: self.given_back.append(("pages", tree, checkpoint)),
            request,
            "tree",
            checkpoint=False,
        )
        hooks.maybe_release_metadata_buffer(
            lambda req, allocator: self.given_back.append(("row", allocator)), request, "rows"
        )

    def iterate(self) -> None:
        """An iteration of SGLang's loop."""
        assert hooks.give_back_held(lambda queue: "bootstrapped", self.queue) == "bootstrapped"

    @property
    def is_idle(self) -> bool:
        scheduler = SimpleNamespace(disagg_prefill_bootstrap_queue=self.queue)
        return hooks.is_fully_idle(True, scheduler)


class _Publication:
    def __init__(self, engine: Prefill) -> None:
        self._engine = engine

    @property
    def is_released(self) -> bool:
        return self._engine.is_released


BOTH = [("pages", "tree", False), ("row", "rows")]


def test_pages_that_are_not_read_are_given_back_at_once() -> None:
    engine = Prefill(holds_pages=False)
    engine.release(engine.request)
    assert (engine.given_back, engine.is_idle) == (BOTH, True)
    engine.iterate()
    assert engine.num_pumped == 0
    engine.release(SimpleNamespace())  # of an engine that decodes, or of none
    assert engine.given_back == BOTH * 2


def test_pages_that_may_be_read_are_given_back_at_released() -> None:
    engine = Prefill(holds_pages=True)
    engine.release(engine.request)
    engine.release(engine.request)  # SGLang still finds them
    engine.iterate()
    assert (engine.given_back, engine.is_idle, engine.num_pumped) == ([], False, 1)
    engine.is_released = True
    engine.iterate()
    assert (engine.given_back, engine.is_idle) == (BOTH, True)


def test_an_engine_that_works_is_not_idle_and_others_are_left_alone() -> None:
    engine = Prefill(holds_pages=False)
    assert not hooks.is_fully_idle(False, SimpleNamespace(disagg_prefill_bootstrap_queue=engine.queue))
    assert hooks.is_fully_idle(True, SimpleNamespace())


@pytest.mark.parametrize("are_zero", [True, False])
def test_tensors_of_the_host_lie_in_memory_that_movers_map(are_zero: bool) -> None:
    given = [torch.arange(5, dtype=torch.int32), torch.ones(3, 4, dtype=torch.bfloat16)]
    made = in_sealed_memory(given, are_zero=are_zero)
    assert [(one.shape, one.dtype) for one in made] == [(one.shape, one.dtype) for one in given]
    assert all(
        torch.equal(one, torch.zeros_like(one) if are_zero else old)
        for one, old in zip(made, given, strict=True)
    )
    shared = share_all({str(number): one for number, one in enumerate(made)})
    assert {one.placement for one in shared.values()} == {MemoryPlacement.MEMFD}


def test_pools_and_rows_are_put_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "is_chosen", lambda: True)
    fused = torch.zeros(2, 8, 2, 4)
    pool = SimpleNamespace(k_buffer=[fused[0]], v_buffer=[fused[1]])
    hooks.share_keys_and_values(None, pool)
    latents = SimpleNamespace(kv_buffer=[torch.zeros(8, 1, 4)])
    hooks.share_latents(None, latents)
    buffers = SimpleNamespace(output_ids=torch.full((3, 16), 7), custom_mem_pool=None, output_dim=0)
    hooks.share_rows(None, buffers)
    assert list(rows_of(buffers)) == ["output_ids"]
    assert buffers.output_ids.tolist() == [[7] * 16] * 3
    tensors = {
        "k": pool.k_buffer[0],
        "v": pool.v_buffer[0],
        "l": latents.kv_buffer[0],
        "r": buffers.output_ids,
    }
    assert {one.placement for one in share_all(tensors).values()} == {MemoryPlacement.MEMFD}
