"""Every name of SGLang's that is relied on. Most are nobody's interface, and change without notice.

`missing` is asked when SGLang starts, and by a test over the version that is locked.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator

# Functions and methods, with the names of their parameters that are relied on.
CALLED = {
    "sglang.srt.arg_groups.choices:add_disagg_transfer_backend_choices": (),
    "sglang.srt.disaggregation.base.conn:KVPoll.Success": (),
    "sglang.srt.disaggregation.common.conn:CommonKVManager.__init__": (
        "args",
        "disaggregation_mode",
        "server_args",
        "is_mla_backend",
    ),
    "sglang.srt.disaggregation.common.conn:CommonKVManager._resolve_rank_mapping": ("info",),
    "sglang.srt.disaggregation.common.conn:CommonKVManager._start_heartbeat_checker_thread": (),
    "sglang.srt.disaggregation.common.conn:CommonKVManager.build_receiver_metadata_message": (
        "bootstrap_room",
    ),
    "sglang.srt.disaggregation.common.conn:CommonKVManager.is_abort_release_safe": (
        "bootstrap_room",
        "required_acks",
    ),
    "sglang.srt.disaggregation.common.conn:CommonKVManager.record_failure": (
        "bootstrap_room",
        "failure_reason",
    ),
    "sglang.srt.disaggregation.common.conn:CommonKVManager.register_to_bootstrap": (),
    "sglang.srt.disaggregation.common.conn:CommonKVManager.update_status": ("bootstrap_room", "status"),
    "sglang.srt.disaggregation.common.conn:CommonKVSender.__init__": (
        "mgr",
        "bootstrap_addr",
        "bootstrap_room",
        "req_has_disagg_prefill_dp_rank",
    ),
    "sglang.srt.disaggregation.common.conn:CommonKVSender._prepare_send_indices": ("kv_indices",),
    "sglang.srt.disaggregation.common.conn:CommonKVSender._record_transfer_indices": (
        "kv_indices",
        "state_indices",
    ),
    "sglang.srt.disaggregation.common.conn:CommonKVSender.abort": (),
    "sglang.srt.disaggregation.common.conn:CommonKVSender.clear": (),
    "sglang.srt.disaggregation.common.conn:CommonKVSender.failure_exception": (),
    "sglang.srt.disaggregation.common.conn:CommonKVSender.init": ("num_kv_indices", "aux_index"),
    "sglang.srt.disaggregation.common.conn:CommonKVSender.poll": (),
    "sglang.srt.disaggregation.common.conn:CommonKVSender.poll_pp_consensus": (),
    "sglang.srt.disaggregation.common.conn:CommonKVSender.send": ("kv_indices", "state_indices"),
    "sglang.srt.disaggregation.common.conn:CommonKVReceiver.__init__": (
        "mgr",
        "bootstrap_addr",
        "bootstrap_room",
    ),
    "sglang.srt.disaggregation.common.conn:CommonKVReceiver._get_bootstrap_info_from_server": (
        "prefill_dp_rank",
    ),
    "sglang.srt.disaggregation.common.conn:CommonKVReceiver._register_kv_args": (),
    "sglang.srt.disaggregation.common.conn:CommonKVReceiver._send_abort_notification": ("force_arm",),
    "sglang.srt.disaggregation.common.conn:CommonKVReceiver._setup_bootstrap_infos": (),
    "sglang.srt.disaggregation.common.conn:CommonKVReceiver.invalidate_cached_bootstrap_infos": (),
    "sglang.srt.disaggregation.common.conn:CommonKVReceiver.poll": (),
    "sglang.srt.disaggregation.common.conn:CommonKVReceiver.send_metadata": (
        "kv_indices",
        "aux_index",
        "state_indices",
        "decode_prefix_len",
    ),
    "sglang.srt.disaggregation.common.conn:CommonKVBootstrapServer._setup_routes": (),
    "sglang.srt.disaggregation.utils:KVClassType.MANAGER": (),
    "sglang.srt.runtime_context:get_disagg": (),
    "sglang.srt.runtime_context:get_parallel": (),
    "sglang.srt.runtime_context:get_serving": (),
}
# Places where a hook stands.
HOOKED = {
    "sglang.srt.disaggregation.decode.DecodePreallocQueue._init_kv_manager": ("self",),
    "sglang.srt.disaggregation.decode.DecodePreallocQueue.hold_rebootstrap": ("self", "req"),
    "sglang.srt.disaggregation.decode.DecodeTransferQueue.__init__": ("self",),
    "sglang.srt.disaggregation.prefill.PrefillBootstrapQueue._init_kv_manager": ("self",),
    "sglang.srt.disaggregation.prefill.PrefillBootstrapQueue.pop_bootstrapped": ("self",),
    "sglang.srt.disaggregation.prefill.maybe_release_metadata_buffer": ("req", "allocator"),
    "sglang.srt.disaggregation.utils.MetadataBuffers.__init__": ("self",),
    "sglang.srt.disaggregation.utils.get_kv_class": ("transfer_backend", "class_type"),
    "sglang.srt.managers.scheduler.Scheduler.is_fully_idle": ("self",),
    "sglang.srt.mem_cache.common.release_kv_cache": ("req", "tree_cache", "checkpoint"),
    "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool._create_buffers_normal": ("self",),
    "sglang.srt.mem_cache.memory_pool.MLATokenToKVPool._create_buffers": ("self",),
}


def missing() -> Iterator[str]:
    """Yield each name that this SGLang has not, or has with other parameters."""
    for place, parameters in CALLED.items():
        module, _, path = place.partition(":")
        yield from _missing(module, path, parameters)
    for place, parameters in HOOKED.items():
        parts = place.split(".")
        split = next(
            number for number, part in enumerate(parts) if part[0].isupper() or number == len(parts) - 1
        )
        yield from _missing(".".join(parts[:split]), ".".join(parts[split:]), parameters)


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
