"""Every name of SGLang's that is relied on. Most are nobody's interface, and change without notice.

`missing` is asked when SGLang starts, and by a test over the version that is locked.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from kvxferd.integrations.sglang import hooks

# Functions and methods by their module, with the names of their parameters that are relied on.
CALLED: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "sglang.srt.arg_groups.choices": {"add_disagg_transfer_backend_choices": ()},
    "sglang.srt.disaggregation.base.conn": {"KVPoll.Success": ()},
    "sglang.srt.disaggregation.common.conn": {
        "CommonKVManager.__init__": ("args", "disaggregation_mode", "server_args", "is_mla_backend"),
        "CommonKVManager._resolve_rank_mapping": ("info",),
        "CommonKVManager._start_heartbeat_checker_thread": (),
        "CommonKVManager.build_receiver_metadata_message": ("bootstrap_room",),
        "CommonKVManager.is_abort_release_safe": ("bootstrap_room", "required_acks"),
        "CommonKVManager.record_failure": ("bootstrap_room", "failure_reason"),
        "CommonKVManager.register_to_bootstrap": (),
        "CommonKVManager.update_status": ("bootstrap_room", "status"),
        "CommonKVSender.__init__": (
            "mgr",
            "bootstrap_addr",
            "bootstrap_room",
            "req_has_disagg_prefill_dp_rank",
        ),
        "CommonKVSender._prepare_send_indices": ("kv_indices",),
        "CommonKVSender._record_transfer_indices": ("kv_indices", "state_indices"),
        "CommonKVSender.abort": (),
        "CommonKVSender.clear": (),
        "CommonKVSender.failure_exception": (),
        "CommonKVSender.init": ("num_kv_indices", "aux_index"),
        "CommonKVSender.poll": (),
        "CommonKVSender.poll_pp_consensus": (),
        "CommonKVSender.send": ("kv_indices", "state_indices"),
        "CommonKVReceiver.__init__": ("mgr", "bootstrap_addr", "bootstrap_room"),
        "CommonKVReceiver._get_bootstrap_info_from_server": ("prefill_dp_rank",),
        "CommonKVReceiver._register_kv_args": (),
        "CommonKVReceiver._send_abort_notification": ("force_arm",),
        "CommonKVReceiver._setup_bootstrap_infos": (),
        "CommonKVReceiver.invalidate_cached_bootstrap_infos": (),
        "CommonKVReceiver.poll": (),
        "CommonKVReceiver.send_metadata": (
            "kv_indices",
            "aux_index",
            "state_indices",
            "decode_prefix_len",
        ),
        "CommonKVBootstrapServer._setup_routes": (),
    },
    "sglang.srt.disaggregation.utils": {"KVClassType.MANAGER": ()},
    "sglang.srt.runtime_context": {"get_disagg": (), "get_parallel": (), "get_serving": ()},
}


class Hook(NamedTuple):
    """A function of `hooks`, and where it stands."""

    module: str
    path: str
    call: Any
    kind: str  # of SGLang's `HookType`
    parameters: tuple[str, ...] = ("self",)


_DECODE, _PREFILL = "sglang.srt.disaggregation.decode", "sglang.srt.disaggregation.prefill"
_UTILS, _POOLS = "sglang.srt.disaggregation.utils", "sglang.srt.mem_cache.memory_pool"
HOOKS = (
    Hook(_UTILS, "get_kv_class", hooks.choose_class, "AROUND", ("transfer_backend", "class_type")),
    Hook(_PREFILL, "PrefillBootstrapQueue._init_kv_manager", hooks.make_manager, "AROUND"),
    Hook(_DECODE, "DecodePreallocQueue._init_kv_manager", hooks.make_manager, "AROUND"),
    Hook(_UTILS, "MetadataBuffers.__init__", hooks.share_rows, "AFTER"),
    Hook(_POOLS, "MHATokenToKVPool._create_buffers_normal", hooks.share_keys_and_values, "AFTER"),
    Hook(_POOLS, "MLATokenToKVPool._create_buffers", hooks.share_latents, "AFTER"),
    Hook(_DECODE, "DecodeTransferQueue.__init__", hooks.keep_while_in_doubt, "AFTER"),
    Hook(_DECODE, "DecodePreallocQueue.hold_rebootstrap", hooks.take_next_room, "BEFORE", ("self", "req")),
    Hook(
        "sglang.srt.mem_cache.common",
        "release_kv_cache",
        hooks.release_kv_cache,
        "AROUND",
        ("req", "tree_cache", "checkpoint"),
    ),
    Hook(
        _PREFILL,
        "maybe_release_metadata_buffer",
        hooks.maybe_release_metadata_buffer,
        "AROUND",
        ("req", "allocator"),
    ),
    Hook(_PREFILL, "PrefillBootstrapQueue.pop_bootstrapped", hooks.give_back_held, "AROUND"),
    Hook("sglang.srt.managers.scheduler", "Scheduler.is_fully_idle", hooks.is_fully_idle, "AFTER"),
)


def missing() -> Iterator[str]:
    """Yield each name that this SGLang has not, or has with other parameters."""
    for module, names in CALLED.items():
        for path, parameters in names.items():
            yield from _missing(module, path, parameters)
    for hook in HOOKS:
        yield from _missing(hook.module, hook.path, hook.parameters)


def _missing(module: str, path: str, parameters: tuple[str, ...]) -> Iterator[str]:
    try:
        found = importlib.import_module(module)
        for name in path.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError) as error:
        yield f"{module}.{path} ({error})"
        return
    if callable(found) and parameters:
        known = inspect.signature(found).parameters
        lacking = [name for name in parameters if name not in known]
        if lacking:
            yield f"{module}.{path} (it takes no {', '.join(lacking)})"
