"""The settings, from the environment of SGLang's processes: KVXFERD_SGLANG_SOCKET and others."""

from __future__ import annotations

import os
from collections.abc import Mapping

import msgspec

from kvxferd.integrations.common.options import Seconds, read_settings

PREFIX = "KVXFERD_SGLANG_"


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The settings, each the variable of that name in capitals behind the prefix."""

    socket: str = "/run/kvxferd/worker/worker.sock"  # of the daemon on this node
    connect_timeout_s: Seconds = 60.0  # at start: the daemon may be starting too
    lease_s: Seconds | None = None  # how long published pages wait for their reader; None: the daemon's
    engine_id: str = ""  # "": from the host's name, the server's port and its role
    home: str = ""  # peer endpoint of the daemon that aggregates an engine of several nodes
    model_fingerprint: str = ""  # "" is derived from the model's configuration and weights


def read_options(environ: Mapping[str, str] = os.environ) -> Options:
    """Return the options. Raises EngineError(config-invalid) naming the wrong one."""
    given = {
        name.removeprefix(PREFIX).lower(): value for name, value in environ.items() if name.startswith(PREFIX)
    }
    return read_settings(Options, given, f"the variables {PREFIX}*", strict=False)
