"""One rank's session with the daemon of its node: what SGLang calls its KV manager.

It describes the rank's pool and registers it, shows a prefill engine to its readers, and takes what comes
from the daemon and from other ranks. Every decode rank talks to the prefill engine's first rank alone, so
no sizes of the two engines have to fit.
"""

from __future__ import annotations

import json
import logging
import secrets
import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
import requests
import torch
import torch.distributed
import zmq
from sglang.srt.disaggregation.common.conn import CommonKVManager
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.runtime_context import get_disagg, get_parallel, get_serving
from sglang.srt.utils.network import NetworkAddress

from kvxferd import engine as kv
from kvxferd.errors import Code, EngineError, KvxferdError
from kvxferd.integrations.common.agreement import gather_from_ranks
from kvxferd.integrations.common.model_digest import Model, fingerprint_of_model
from kvxferd.integrations.common.sleep import suspend
from kvxferd.integrations.sglang import messages
from kvxferd.integrations.sglang.held import HeldRequests
from kvxferd.integrations.sglang.identity import SourceIdentity
from kvxferd.integrations.sglang.layout.pools import aux_tensors, of_stage
from kvxferd.integrations.sglang.layout.support import describe
from kvxferd.integrations.sglang.memory import rows_of
from kvxferd.integrations.sglang.options import Options, read_options
from kvxferd.integrations.sglang.transfers import Blocks, RankTransfers

_LOG = logging.getLogger("sglang.kvxferd")
_HTTP_TIMEOUT_S = 5
_SUSPEND_TIMEOUT_S = 30
_MESSAGES_A_PUMP = 256  # each request polls: far more than ranks send


class Manager(CommonKVManager):  # type: ignore[misc]
    """One rank's session with the daemon of its node."""

    # SGLang keeps the pages of a request that failed until `is_abort_release_safe`.
    supports_deferred_decode_kv_release = True
    queue: Any = None  # SGLang's, which is making this manager: it knows the pool and the model

    def __init__(self, args: Any, mode: Any, server_args: Any, is_mla_backend: bool = False) -> None:
        parallel = get_parallel()
        _refuse_what_is_not_planned(parallel, mode, server_args)
        options = read_options()
        groups = (parallel.attn_tp_group, parallel.pp_group)
        own = (_engine_id(options, mode, parallel, args), *(secrets.token_hex(16) for _ in range(3)))
        engine_id, generation, secret, self._key = gather_from_ranks(groups, own)[0]
        self._tensors, rank = self._register(options, parallel, engine_id, generation)
        self.identity = SourceIdentity(rank.reference("any").endpoint, engine_id, generation, secret)
        self.is_lead = (parallel.pp_rank, parallel.attn_tp_rank) == (0, 0)
        self.rank = rank
        self.transfers = RankTransfers(
            rank,
            self.identity,
            is_lead=self.is_lead,
            lease_s=options.lease_s,
            stage=parallel.pp_rank,
            num_stages=parallel.pp_size,
        )
        self.held = HeldRequests(lambda flags: _all_true(flags, parallel.attn_tp_group.cpu_group))
        super().__init__(args, mode, server_args, is_mla_backend)
        addresses = gather_from_ranks(groups, NetworkAddress(self.local_ip, self.rank_port).to_tcp())
        self._lead_address = addresses[0]
        self.enable_deferred_decode_kv_release = True
        if mode == DisaggregationMode.DECODE:
            self._start_heartbeat_checker_thread()

    def _register(
        self, options: Options, parallel: Any, engine_id: str, generation: str
    ) -> tuple[dict[str, kv.NamedTensor], kv.RankHandle]:
        """Describe the pool and register it. Blocks. Raises KvxferdError."""
        queue = self.queue
        model = queue.scheduler.model_config
        if queue.draft_token_to_kv_pool is not None:
            raise EngineError(
                "cannot move the cache of a draft model yet: start without --speculative-*", Code.BAD_REQUEST
            )
        described = describe(queue.token_to_kv_pool, queue.scheduler.sliding_window_size)
        described = of_stage(described, parallel.pp_rank)
        num_layers = model.num_hidden_layers
        tensors, groups = dict(described.tensors), list(described.groups)
        if parallel.pp_group.is_last_rank:
            rows, aux = aux_tensors(rows_of(queue.metadata_buffers), num_layers - 1)
            tensors, groups = {**tensors, **rows}, [*groups, aux]
        spec = kv.EngineSpec(
            engine_id,
            generation,
            num_layers,
            pp_size=parallel.pp_size,
            tp_size=parallel.attn_tp_size,
            pp_rank=parallel.pp_rank,
            tp_rank=parallel.attn_tp_rank,
            num_kv_heads=model.get_total_num_kv_heads(),
            fingerprint=options.model_fingerprint or _fingerprint(model, queue.scheduler.server_args),
            home=options.home,
        )
        rank = kv.register(
            options.socket,
            spec,
            tensors,
            groups,
            layers=described.layers,
            timeout_s=options.connect_timeout_s,
        )
        _LOG.info("rank (%d, %d) of %s@%s is registered", spec.pp_rank, spec.tp_rank, engine_id, generation)
        self.full, self.states = str(described.groups[0].name), described.states
        self.has_aux = len(groups) > len(described.groups)
        return tensors, rank

    def register_to_bootstrap(self) -> None:
        """Show this engine to its readers. Raises RuntimeError where its bootstrap server cannot."""
        super().register_to_bootstrap()
        if self.is_lead:
            self._show_identity()

    def follow_daemon(self) -> None:
        """Show this engine anew where its daemon has come back at another endpoint."""
        with suppress(KvxferdError, requests.RequestException):  # it is shown with the next request
            if self.is_lead and (endpoint := self.rank.reference("any").endpoint) != self.identity.endpoint:
                self.identity = msgspec.structs.replace(self.identity, endpoint=endpoint)
                self._show_identity()

    def _show_identity(self) -> None:
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(self.bootstrap_host, self.bootstrap_host)
        url = f"http://{host}:{self.bootstrap_port}/kvxferd/{self._replica}"
        reply = requests.put(url, json=msgspec.to_builtins(self.identity), timeout=_HTTP_TIMEOUT_S)
        if reply.status_code != 200:
            raise RuntimeError(
                f"cannot register with the bootstrap server: {url} has status {reply.status_code}; SGLang's "
                "Rust server has none of kvxferd's, start without it"
            )

    @property
    def _replica(self) -> int:
        """The data-parallel rank, as SGLang's bootstrap server counts it."""
        return int(self.attn_dp_rank if self.system_dp_size == 1 else self.system_dp_rank)

    def _resolve_rank_mapping(self, info: Any) -> None:
        """Have the first rank alone looked up: which ranks are read, the daemon decides."""
        info.target_tp_rank, info.target_tp_ranks = 0, [0]
        info.target_cp_ranks, info.target_pp_ranks = [0], [0]
        info.required_dst_info_num = info.required_prefill_response_num = 1

    def build_receiver_metadata_message(self, *, bootstrap_room: int, **_: Any) -> list[bytes]:
        """Return what tells the prefill engine that this rank has begun to pull."""
        return messages.encode_pulling(bootstrap_room)

    def is_abort_release_safe(self, bootstrap_room: int, required_acks: int) -> bool:
        """Whether nothing writes the room's pages any more."""
        self.pump()
        return self.transfers.is_quiet(bootstrap_room)

    def pump(self) -> None:
        """Handle what has come from the daemon, and some of what has come from other ranks. Never waits."""
        for message in self._received():
            match message:
                case messages.Pulling(room):
                    self.transfers.handle_reader(room)
                case messages.Aborted(room):
                    self.transfers.handle_reader_gone(room)
                case messages.StagePages() as written:
                    blocks = {
                        name: kv.BlockList(
                            ids=memoryview(one.ids).cast("i"),
                            first_token=one.first_token,
                            state_at=one.state_at,
                        )
                        for name, one in written.pages.items()
                    }
                    self.transfers.handle_stage(
                        written.room, written.stage, blocks, written.num_tokens, written.ready_tokens
                    )
        self.transfers.pump()

    def send_stage(self, room: int, blocks: Blocks, num_tokens: int, ready_tokens: int | None) -> None:
        """Send what this stage has written to the lead, where this is the stage's first rank."""
        stage = self.transfers.stage
        if stage == 0 or self.attn_tp_rank != 0:
            return
        pages = {
            name: messages.ListedPages(packed_ids(one.ids).tobytes(), one.first_token, one.state_at)
            for name, one in blocks.items()
        }
        written = messages.StagePages(room, stage, num_tokens, ready_tokens, pages)
        self._send_multipart_locked(self._lead_address, messages.encode_stage(written, self._key))

    def _received(self) -> Iterator[messages.Pulling | messages.Aborted | messages.StagePages]:
        """Yield messages that have come: whoever sends without end does not hold SGLang's loop."""
        for _ in range(_MESSAGES_A_PUMP):
            try:
                frames = self.server_socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if (message := messages.decode(frames, self._key)) is not None:
                yield message

    def deregister_buffer_to_engine(self) -> None:
        """Give the memory back, before SGLang frees it for its sleep. Blocks."""
        suspend(self.rank, self.pump, _SUSPEND_TIMEOUT_S)

    def register_buffer_to_engine(self) -> None:
        """Offer the memory again, after SGLang's sleep. Blocks."""
        kv.resume(self.rank, self._tensors)


def packed_ids(pages: Any) -> Any:
    """Return SGLang's indices as block ids."""
    return np.ascontiguousarray(pages, dtype=np.int32)


def _all_true(flags: list[bool], group: Any) -> list[bool]:
    """Return for each flag whether it is True on every rank."""
    agreed = torch.tensor([int(flag) for flag in flags], dtype=torch.uint8)
    torch.distributed.all_reduce(agreed, op=torch.distributed.ReduceOp.MIN, group=group)
    return [bool(flag) for flag in agreed.tolist()]


def _engine_id(options: Options, mode: Any, parallel: Any, args: Any) -> str:
    """Return the engine's name; each data-parallel replica is an engine of its own."""
    name = options.engine_id or f"sglang-{mode.value}-{socket.gethostname()}-{get_serving().port}"
    if parallel.dp_size == parallel.attn_dp_size == 1:
        return name
    return f"{name}-dp{parallel.attn_dp_rank if parallel.dp_size == 1 else args.system_dp_rank}"


def _fingerprint(model: Any, server_args: Any) -> str:
    """Return a text that is equal for two engines whose caches hold the same values."""
    digested = Model(
        model.model_path,
        getattr(model, "revision", None),
        lambda: dict(model.hf_config.to_dict()),
        overrides=json.loads(server_args.json_model_override_args or "{}"),
        loads_files=server_args.load_format != "dummy",
    )
    architectures = getattr(model.hf_config, "architectures", None)
    return fingerprint_of_model(digested, architectures, model.dtype, model.quantization)


def _refuse_what_is_not_planned(parallel: Any, mode: Any, server_args: Any) -> None:
    """Raise EngineError for an engine whose cache is not described, naming the setting."""
    for is_set, setting in (
        (parallel.attn_cp_size > 1, "context parallelism (--attention-context-parallel-size)"),
        (parallel.attn_dcp_size > 1, "decode context parallelism (--dcp-size)"),
        (parallel.enable_kv_cache_sharding, "pages that ranks share out (--enable-kv-cache-sharding)"),
        (parallel.pp_size > 1 and mode == DisaggregationMode.DECODE, "pipeline stages (--pp-size)"),
        (
            get_disagg().disaggregation_decode_allocation_policy != "early",
            "another policy than --disaggregation-decode-allocation-policy early",
        ),
        (getattr(server_args, "enable_hisparse", False), "--enable-hisparse"),
    ):
        if is_set:
            raise EngineError(
                f"cannot move the cache of an engine with {setting}: start it without", Code.BAD_REQUEST
            )
