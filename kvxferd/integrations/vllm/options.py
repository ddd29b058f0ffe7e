"""The keys of ``kv_connector_extra_config``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from kvxferd.integrations.common.options import Count, Seconds, read_settings

# vLLM's names: L layer, B block, H head, N token, C keys and values of one head and token.
LayoutName = Literal["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"]


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The connector's settings, checked when the engine starts."""

    socket: str = "/run/kvxferd/worker/worker.sock"
    connect_timeout_s: Seconds = 60.0  # at start: the daemon may be starting too
    pull_deadline_s: Seconds = 60.0  # a pull ends within it; a progressive one, once the prompt is computed
    lease_s: Seconds | None = None  # how long published blocks wait for a first reader; None: the daemon's
    progressive: bool = False  # caches are read while they are computed, where the router asks both at once
    progressive_requests: Count = 32  # that may wait here for running prefills
    # the share of the cache's blocks that such requests may have
    progressive_blocks: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.5
    num_readers: Count = 1  # decode engines that read each request
    home: str = ""  # peer endpoint of the daemon that aggregates an engine of several nodes
    model_fingerprint: str = ""  # "" is derived from the model's configuration
    opaque_cache_version: str = ""  # "": vLLM's; opaque pages move between engines of equal ones alone
    placement: Literal["auto", "child", "resident"] = "auto"  # of a rank's mover; auto: the first that works
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
    return read_settings(Options, given, "kv_connector_extra_config")
