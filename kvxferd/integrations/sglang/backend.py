"""SGLang's four classes of a transfer backend, over `transfers`.

They are `CommonKV*` with other transfers, because SGLang's scheduler reads attributes of those. Bootstrap
goes as with SGLang's own backends: the prefill engine's ranks register with its bootstrap server, decode
ranks look the engine up there, and a request's cache is computed once a decode rank has pages for it. They
are the manager's (`manager`), a sender and a receiver for each request, and the bootstrap server.
"""

from __future__ import annotations

import logging
from typing import Any

import msgspec
import requests
import torch
from aiohttp import web
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import (
    CommonKVBootstrapServer,
    CommonKVReceiver,
    CommonKVSender,
)
from sglang.srt.disaggregation.utils import KVClassType

from kvxferd import engine as kv
from kvxferd.integrations.sglang.identity import SourceIdentity
from kvxferd.integrations.sglang.layout.pools import AUX
from kvxferd.integrations.sglang.manager import Manager, packed_ids
from kvxferd.integrations.sglang.transfers import STALE, Blocks, Reception, State

_LOG = logging.getLogger("sglang.kvxferd")
_HTTP_TIMEOUT_S = 5


class Sender(CommonKVSender):  # type: ignore[misc]
    """A request of the prefill engine."""

    _early_send_wait_event: Any  # SGLang's, behind the kernels that write the chunk which is sent next

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kv_mgr.follow_daemon()
        self.publication = self.kv_mgr.transfers.open_publication(self.bootstrap_room)
        # What SGLang does on all ranks alike, whatever has become of the transfer on one of them.
        self._was_sent = False
        self._was_cut_short = False  # SGLang has aborted it, or has taken its failure
        self._take_state()  # which the first stage has of the others, that are not polled before it

    @property
    def holds_pages(self) -> bool:
        """Whether SGLang gives pages back that may be read still. The same on every rank of a stage."""
        return self._was_cut_short and self._was_sent

    def send(
        self,
        kv_indices: Any,
        state_indices: list[Any] | None = None,
        num_kv_tokens: int | None = None,
        indices_event: Any = None,
    ) -> None:
        """Publish a chunk's pages, the first time or behind the earlier ones."""
        after, self._early_send_wait_event = self._early_send_wait_event, None
        self._was_sent = True
        if self.conclude_state is not None:
            return
        page = self.kv_mgr.kv_args.page_size
        first_token = self.curr_idx * page
        pages, _, is_last, _ = self._prepare_send_indices(kv_indices, state_indices)
        num_tokens = self.num_kv_indices * page
        blocks = _blocks(self.kv_mgr, pages, first_token)
        if is_last:
            blocks |= _states(self.kv_mgr, state_indices, num_tokens, self.aux_index)
        ready = None if is_last else self.curr_idx * page
        self.publication.send(blocks, num_tokens, ready, after or _recorded_event(self.kv_mgr))
        self.kv_mgr.send_stage(self.bootstrap_room, blocks, num_tokens, ready)
        self._record_transfer_indices(kv_indices, state_indices)

    def poll(self) -> Any:
        """Return the state of the request's transfer."""
        self._take_state()
        return super().poll()

    def poll_pp_consensus(self) -> Any:
        """Return the least state of all stages."""
        self._take_state()
        return super().poll_pp_consensus()

    def abort(self) -> None:
        """Withdraw the request. It fails once its pages are not read any more."""
        self._was_cut_short = True
        self.kv_mgr.record_failure(self.bootstrap_room, "Aborted by AbortReq.")
        self.publication.abort("Aborted by AbortReq.")
        self._take_state()
        if self.publication.state is State.FAILED:
            self.conclude_state = KVPoll.Failed
            self.clear()

    def failure_exception(self) -> None:
        """Raise KVTransferError with the reason."""
        self._was_cut_short = True
        self.publication.abort("SGLang has given the request up")
        super().failure_exception()

    def clear(self) -> None:
        """Forget the request."""
        super().clear()
        self.kv_mgr.transfers.forget(self.publication)

    def _take_state(self) -> None:
        self.kv_mgr.pump()
        state = self.publication.state
        if state is State.FAILED:
            with self.kv_mgr.failure_lock:
                self.kv_mgr.failure_records.setdefault(self.bootstrap_room, self.publication.error)
        self.kv_mgr.update_status(self.bootstrap_room, int(state))


class Receiver(CommonKVReceiver):  # type: ignore[misc]
    """A request of the decode engine."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.reception = Reception(self.kv_mgr.transfers, self.bootstrap_room)
        self._metadata: dict[str, Any] | None = None  # until a second start of the source was tried

    def send_metadata(self, kv_indices: Any, *args: Any, **kwargs: Any) -> None:
        """Pull the request's cache into these pages, and tell the prefill engine that it may compute it."""
        self._metadata = {"kv_indices": kv_indices, "args": args, "kwargs": kwargs}
        self._pull(kv_indices, *args, **kwargs)
        if self.reception.state is not State.FAILED:
            super().send_metadata(kv_indices, *args, **kwargs)

    def poll(self) -> Any:
        """Return the state of the request's transfer."""
        self.kv_mgr.pump()
        if self.reception.state is State.FAILED and self.reception.code in STALE and self._metadata:
            self._look_up_again()
        match self.reception.state:
            case State.SUCCESS:
                self.kv_mgr.update_status(self.bootstrap_room, KVPoll.Success)
            case State.TRANSFERRING:
                self.kv_mgr.update_status(self.bootstrap_room, KVPoll.Transferring)
            case State.FAILED:
                with self.kv_mgr.failure_lock:
                    self.kv_mgr.failure_records.setdefault(self.bootstrap_room, self.reception.error)
                self.kv_mgr.update_status(self.bootstrap_room, KVPoll.Failed)
        return super().poll()

    def _pull(
        self,
        kv_indices: Any,
        aux_index: int | None = None,
        state_indices: list[Any] | None = None,
        decode_prefix_len: int | None = None,
        **_: Any,
    ) -> None:
        if not self.bootstrap_infos:
            return  # SGLang's own part fails the request
        first_token = decode_prefix_len or 0
        num_tokens = first_token + len(kv_indices) * self.kv_mgr.kv_args.page_size
        blocks = _blocks(self.kv_mgr, kv_indices, first_token)
        blocks |= _states(self.kv_mgr, state_indices, num_tokens, aux_index)
        source = msgspec.convert(self.bootstrap_infos[0]["kvxferd"], SourceIdentity)
        self.reception.pull(source, blocks, num_tokens, self.kv_mgr.waiting_timeout)

    def _look_up_again(self) -> None:
        """Ask the bootstrap server again, once: the prefill engine may have restarted under its address."""
        metadata, self._metadata = self._metadata, None
        before = self.bootstrap_infos
        self.kv_mgr.prefill_info_table.pop(self.bootstrap_addr, None)
        self.invalidate_cached_bootstrap_infos()
        self._setup_bootstrap_infos()
        if metadata is not None and self.bootstrap_infos and self.bootstrap_infos != before:
            self._pull(metadata["kv_indices"], *metadata["args"], **metadata["kwargs"])
            super().send_metadata(metadata["kv_indices"], *metadata["args"], **metadata["kwargs"])

    def _register_kv_args(self) -> bool:
        return True  # the daemons know the layouts

    def _get_bootstrap_info_from_server(self, prefill_dp_rank: int, *args: Any) -> dict[str, Any] | None:
        info = super()._get_bootstrap_info_from_server(prefill_dp_rank, *args)
        if info is None:
            return None
        url = f"http://{self.bootstrap_addr}/kvxferd/{prefill_dp_rank}"
        try:
            reply = requests.get(url, timeout=_HTTP_TIMEOUT_S)
            identity = msgspec.json.decode(reply.content, type=SourceIdentity) if reply.ok else None
        except (requests.RequestException, msgspec.DecodeError, msgspec.ValidationError) as error:
            _LOG.error("cannot read %s: %s; does that engine run kvxferd's backend?", url, error)
            return None
        if identity is None:
            _LOG.error("cannot read %s: status %d; does that engine run kvxferd?", url, reply.status_code)
            return None
        return {**info, "kvxferd": msgspec.to_builtins(identity)}

    def _send_abort_notification(self, *, force_arm: bool = False) -> None:
        """End the pull, and tell the prefill engine that nobody wants the room."""
        self.reception.cancel()
        super()._send_abort_notification(force_arm=force_arm)


class BootstrapServer(CommonKVBootstrapServer):  # type: ignore[misc]
    """SGLang's, with one more route: how an engine's readers find it at its daemon."""

    def _setup_routes(self) -> None:
        super()._setup_routes()
        self._identities: dict[str, SourceIdentity] = {}
        self.app.router.add_put("/kvxferd/{replica}", self._put_identity)
        self.app.router.add_get("/kvxferd/{replica}", self._get_identity)

    async def _put_identity(self, request: web.Request) -> web.Response:
        try:
            identity = msgspec.json.decode(await request.read(), type=SourceIdentity)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            return web.Response(status=400, text=str(error))
        self._identities[request.match_info["replica"]] = identity
        return web.Response(text="OK")

    async def _get_identity(self, request: web.Request) -> web.Response:
        identity = self._identities.get(request.match_info["replica"])
        if identity is None:
            return web.Response(status=404, text="this replica has not registered")
        return web.Response(body=msgspec.json.encode(identity), content_type="application/json")


CLASSES = {
    KVClassType.MANAGER: Manager,
    KVClassType.SENDER: Sender,
    KVClassType.RECEIVER: Receiver,
    KVClassType.BOOTSTRAP_SERVER: BootstrapServer,
}
"""By SGLang's name of their kind; its `KVArgs` are used as they are."""


def _blocks(manager: Manager, pages: Any, first_token: int) -> dict[str, kv.BlockList]:
    return {manager.full: kv.BlockList(ids=packed_ids(pages), first_token=first_token)}


def _states(manager: Manager, indices: list[Any] | None, num_tokens: int, aux_index: int | None) -> Blocks:
    """Return the blocks that come once, with the last pages: a window's pages, and the metadata's row."""
    blocks = {}
    if manager.has_aux:
        blocks[AUX] = kv.BlockList(ids=[aux_index or 0], state_at=num_tokens)
    for kind, pages in zip(manager.kv_args.state_types, indices or (), strict=False):
        ids = packed_ids(pages)
        first_token = num_tokens - len(ids) * manager.kv_args.page_size
        blocks[manager.states[kind.value]] = kv.BlockList(ids=ids, first_token=first_token)
    return blocks


def _recorded_event(manager: Manager) -> Any:
    """Return an event behind the kernels that were launched; None on a CPU."""
    device = manager.queue.token_to_kv_pool.device
    if str(device).startswith("cpu"):
        return None
    event = torch.get_device_module(device).Event()
    event.record()
    return event
