"""The keys of ``kv_connector_extra_config``, and the connection to the daemon that they name."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from kvxferd import client
from kvxferd.errors import Code, EngineError, KvxferdError
from kvxferd.ids import Endpoint

# vLLM's names: L layer, B block, H head, N token, C keys and values of one head and token.
LayoutName = Literal["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"]


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The connector's settings, checked when the engine starts."""

    socket: str = "/run/kvxferd/worker/worker.sock"
    connect_timeout_s: float = 60.0  # at start: the daemon may be starting too
    pull_deadline_s: float = 60.0  # a pull ends within it; a progressive one, once the prompt is computed
    lease_s: float | None = None  # how long published blocks wait for a first reader; None: the daemon's
    progressive: bool = False  # caches are read while they are computed, where the router asks both at once
    progressive_requests: int = 32  # that may wait here for running prefills
    progressive_blocks: float = 0.5  # the share of the cache's blocks that such requests may have
    num_readers: int = 1  # decode engines that read each request
    home: str = ""  # peer endpoint of the daemon that aggregates an engine of several nodes
    model_fingerprint: str = ""  # "" is derived from the model's configuration
    opaque_cache_version: str = ""  # "": vLLM's; opaque pages move between engines of equal ones alone
    adopt_cpu_memory: bool = True  # False: CPU caches are always copied through a shared buffer
    gpu_placement: Literal["auto", "exported", "resident"] = "auto"  # auto: exported, or else resident
    kv_cache_layout: Literal[LayoutName, "auto", "engine"] = "auto"  # see preferred_layout

    def preferred_layout(self, *, has_latents: bool) -> LayoutName | None:
        """Return the layout to ask of vLLM; None leaves it to the attention backend.

        `auto` is heads first, so that a rank's heads of a block are one range for a reader of any
        tensor-parallel size. Latents (MLA) have no heads. A page of all layers (BLHNC) is read in one piece
        by an equal engine alone, which this one does not know yet: it has to be named.
        """
        if self.kv_cache_layout == "engine":
            return None
        if self.kv_cache_layout == "auto":
            return None if has_latents else "LBHNC"
        return self.kv_cache_layout


def read_options(given: Mapping[str, Any]) -> Options:
    """Return the options. Raises EngineError(config-invalid) naming the wrong one."""
    try:
        options = msgspec.convert(dict(given), Options)
    except msgspec.ValidationError as error:
        raise EngineError(
            f"cannot read kv_connector_extra_config: {error}; "
            f"known are {', '.join(Options.__struct_fields__)}",
            Code.CONFIG_INVALID,
        ) from error
    for name in ("connect_timeout_s", "pull_deadline_s", "lease_s"):
        value = getattr(options, name)
        if value is not None and not 0 < value < float("inf"):
            raise EngineError(
                f"cannot use {name} = {value} in kv_connector_extra_config: give seconds above 0",
                Code.CONFIG_INVALID,
            )
    for name in ("num_readers", "progressive_requests"):
        if (number := getattr(options, name)) < 1:
            raise EngineError(
                f"cannot use {name} = {number} in kv_connector_extra_config: give 1 or more",
                Code.CONFIG_INVALID,
            )
    if not 0 < options.progressive_blocks <= 1:
        raise EngineError(
            f"cannot use progressive_blocks = {options.progressive_blocks} in kv_connector_extra_config: "
            "give a share of the cache's blocks, above 0 and at most 1",
            Code.CONFIG_INVALID,
        )
    return options


def home_of(options: Options) -> Endpoint:
    """Return the endpoint of the engine's home daemon; empty for the local one."""
    return Endpoint(options.home)


def connect_to_daemon(options: Options, name: str, deadline: float) -> client.Client:
    """Return a connection to the node's daemon. Raises KvxferdError; its message has the command to start."""
    try:
        return client.connect(options.socket, timeout_s=max(1.0, deadline - time.monotonic()), name=name)
    except KvxferdError as error:
        raise KvxferdError(
            f"{error.message}; start `kvxferd serve` on this node, or name its worker socket in "
            'kv_connector_extra_config: {"socket": ...}',
            error.code,
        ) from error
