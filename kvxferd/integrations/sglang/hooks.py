"""Where SGLang knows no backend and has to: what its plugin interface puts around functions of its own.

Each does nothing unless kvxferd is the engine's transfer backend.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from kvxferd.integrations.sglang.identity import next_room
from kvxferd.integrations.sglang.memory import in_sealed_memory, rows_of

BACKEND = "kvxferd"
Original = Callable[..., Any]


def is_chosen() -> bool:
    """Whether this engine's transfer backend is kvxferd."""
    from sglang.srt.runtime_context import get_disagg

    disagg = get_disagg()
    return disagg.disaggregation_mode != "null" and bool(disagg.disaggregation_transfer_backend == BACKEND)


def choose_class(original: Original, transfer_backend: Any, class_type: Any) -> Any:
    """Around `get_kv_class`."""
    if getattr(transfer_backend, "value", transfer_backend) != BACKEND:
        return original(transfer_backend, class_type)
    from kvxferd.integrations.sglang.backend import CLASSES

    return CLASSES.get(class_type) or original(transfer_backend, class_type)


def make_manager(original: Original, queue: Any) -> Any:
    """Around `_init_kv_manager` of either queue: `KVArgs` has addresses alone, and the queue has the pool."""
    if not is_chosen():
        return original(queue)
    from kvxferd.integrations.sglang.manager import Manager

    Manager.queue = queue
    return original(queue)


def share_keys_and_values(_result: Any, pool: Any) -> None:
    """After `MHATokenToKVPool._create_buffers_normal`: put its buffers of zeros into sealed memory."""
    tensors = [*pool.k_buffer, *pool.v_buffer]
    if is_chosen() and tensors and tensors[0].device.type == "cpu":
        made = in_sealed_memory(tensors, are_zero=True)
        pool.k_buffer, pool.v_buffer = made[: len(pool.k_buffer)], made[len(pool.k_buffer) :]


def share_latents(_result: Any, pool: Any) -> None:
    """After `MLATokenToKVPool._create_buffers`: do the same."""
    if is_chosen() and pool.kv_buffer and pool.kv_buffer[0].device.type == "cpu":
        pool.kv_buffer = in_sealed_memory(pool.kv_buffer, are_zero=True)


def share_rows(_result: Any, buffers: Any, *_args: Any, **_kwargs: Any) -> None:
    """After `MetadataBuffers.__init__`: do the same."""
    if is_chosen():
        rows = rows_of(buffers)
        made = in_sealed_memory(list(rows.values()), are_zero=False)
        for name, tensor in zip(rows, made, strict=True):
            setattr(buffers, name, tensor)


def keep_while_in_doubt(_result: Any, queue: Any, *_args: Any, **_kwargs: Any) -> None:
    """After `DecodeTransferQueue.__init__`: pages in doubt are kept until `Quiesced`, not for 30 s."""
    if is_chosen():
        queue.enable_deferred_kv_release, queue.deferred_kv_release_timeout = True, math.inf


def release_kv_cache(original: Original, req: Any, tree_cache: Any, *, checkpoint: bool) -> None:
    """Around the function that gives a request's pages back: not while they may be read."""
    if not _hold(req, "pages", lambda: original(req, tree_cache, checkpoint=checkpoint)):
        original(req, tree_cache, checkpoint=checkpoint)


def maybe_release_metadata_buffer(original: Original, req: Any, allocator: Any) -> None:
    """Around the function that gives back a request's row of metadata."""
    if not _hold(req, "row", lambda: original(req, allocator)):
        original(req, allocator)


def give_back_held(original: Original, queue: Any, *args: Any, **kwargs: Any) -> Any:
    """Around `PrefillBootstrapQueue.pop_bootstrapped`, which every iteration of a prefill loop calls."""
    if (held := getattr(queue.kv_manager, "held", None)) is not None and held:
        queue.kv_manager.pump()
        held.give_back()
    return original(queue, *args, **kwargs)


def is_fully_idle(result: bool, scheduler: Any, *_args: Any, **_kwargs: Any) -> bool:
    """After `Scheduler.is_fully_idle`: an engine that keeps pages of aborted requests is not."""
    queue = getattr(scheduler, "disagg_prefill_bootstrap_queue", None)
    return result and not getattr(getattr(queue, "kv_manager", None), "held", ())


def take_next_room(_queue: Any, req: Any) -> None:
    """Before `DecodePreallocQueue.hold_rebootstrap`: the request is computed again, and its id is used up."""
    if is_chosen() and req.bootstrap_room is not None:
        req.bootstrap_room = next_room(req.bootstrap_room)


def _hold(req: Any, kind: str, give_back: Callable[[], object]) -> bool:
    """Keep what is given back too early. Return whether it was kept."""
    sender: Any = getattr(req, "disagg_kv_sender", None)
    if not getattr(sender, "holds_pages", False):
        return False

    def give_back_and_clear() -> None:
        give_back()
        sender.clear()

    publication = sender.publication
    sender.kv_mgr.held.hold(req, kind, give_back_and_clear, lambda: publication.is_released)
    return True
