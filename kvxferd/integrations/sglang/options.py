"""The settings, from the environment of SGLang's processes: KVXFERD_SGLANG_SOCKET and others."""

from __future__ import annotations

import os
from collections.abc import Mapping

import msgspec

from kvxferd.errors import Code, EngineError

PREFIX = "KVXFERD_SGLANG_"


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The settings, each the variable of that name in capitals behind the prefix."""

    socket: str = "/run/kvxferd/worker/worker.sock"  # of the daemon on this node
    connect_timeout_s: float = 60.0  # at start: the daemon may be starting too
    lease_s: float | None = None  # how long published pages wait for their reader; None: the daemon's
    engine_id: str = ""  # "": from the host's name, the server's port and its role
    home: str = ""  # peer endpoint of the daemon that aggregates an engine of several nodes
    model_fingerprint: str = ""  # "" is derived from the model's configuration and weights


def read_options(environ: Mapping[str, str] = os.environ) -> Options:
    """Return the options. Raises EngineError(config-invalid) naming the wrong variable."""
    given = {
        name.removeprefix(PREFIX).lower(): value for name, value in environ.items() if name.startswith(PREFIX)
    }
    try:
        options = msgspec.convert(given, Options, strict=False)
    except msgspec.ValidationError as error:
        known = ", ".join(f"{PREFIX}{name.upper()}" for name in Options.__struct_fields__)
        raise EngineError(
            f"cannot read {PREFIX}*: {error}; known are {known}", Code.CONFIG_INVALID
        ) from error
    for name in ("connect_timeout_s", "lease_s"):
        value = getattr(options, name)
        if value is not None and not 0 < value < float("inf"):
            raise EngineError(
                f"cannot use {PREFIX}{name.upper()} = {value}: give seconds above 0", Code.CONFIG_INVALID
            )
    return options
