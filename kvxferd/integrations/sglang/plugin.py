"""SGLang's plugin: makes `kvxferd` a transfer backend of SGLang's, in each of its processes."""

from __future__ import annotations

import logging
from importlib.metadata import version
from typing import Any

from kvxferd.errors import Code, EngineError
from kvxferd.integrations.sglang import contract, hooks
from kvxferd.integrations.sglang.layout.support import SGLANG_VERSIONS

_LOG = logging.getLogger("sglang.kvxferd")


def register() -> None:
    """Register the backend and its hooks. SGLang logs what it raises, and goes on without the backend.

    Raises EngineError where this SGLang lacks a name that is relied on.
    """
    check_version(version("sglang"))
    from sglang.srt.arg_groups.choices import add_disagg_transfer_backend_choices
    from sglang.srt.disaggregation.utils import TransferBackend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if hooks.BACKEND not in TransferBackend._value2member_map_:
        _add_member(TransferBackend)
        add_disagg_transfer_backend_choices([hooks.BACKEND])
    for hook in contract.HOOKS:
        HookRegistry.register(f"{hook.module}.{hook.path}", hook.call, HookType[hook.kind])


def check_version(found: str) -> None:
    """Raise EngineError where this SGLang lacks what is relied on; warn of one that was not tried."""
    if found in SGLANG_VERSIONS:
        return
    lacking = list(contract.missing())
    if lacking:
        raise EngineError(
            f"cannot be a transfer backend of SGLang {found}: it lacks {'; '.join(lacking)}; "
            f"use SGLang {' or '.join(SGLANG_VERSIONS)}",
            Code.BAD_VERSION,
        )
    _LOG.warning("kvxferd's backend was not tried with SGLang %s, but with %s", found, SGLANG_VERSIONS)


def _add_member(backends: Any) -> None:
    """Add a member to SGLang's enum of backends, which has no function for it."""
    member = object.__new__(backends)
    member._name_, member._value_ = hooks.BACKEND.upper(), hooks.BACKEND
    backends._member_map_[member._name_] = member
    backends._value2member_map_[hooks.BACKEND] = member
    backends._member_names_.append(member._name_)
