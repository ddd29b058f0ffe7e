"""Plans from layouts, and runs from plans and block ids: which rank reads which bytes. Pure arithmetic.

`TransferTopology` is a local rank's registry of remote engines: its `register_remote_engine` is the one place
where the daemon plans. `make_plan` makes a plan, and `Expander` turns one request's block ids into runs.
`EngineTransferInfo` and `sender_plan` have the names of in-engine connectors, too.
"""

from kvxferd.plan.block_list_checks import (
    BlockRules,
    block_rules,
    check_blocks,
    check_open_blocks,
    check_request,
    engine_rules,
    has_all_blocks,
)
from kvxferd.plan.block_windows import ListRules, SourceLists, list_rules
from kvxferd.plan.differences import find_differences
from kvxferd.plan.engine_checks import (
    check_engine,
    check_same_engine,
    require_pp_aware,
    set_xfer_handshake_metadata_pp_aware,
)
from kvxferd.plan.expand import MAX_RUNS, Expander, Runs
from kvxferd.plan.pieces import PieceRules, covered_tokens
from kvxferd.plan.plan import Plan, decode_plan, encode_plan, plan_bytes
from kvxferd.plan.planned_reads import PlanJob, PlanKey, PlannedReads
from kvxferd.plan.planner import make_plan
from kvxferd.plan.registered_engine import RegisteredEngine, digest_of_layouts
from kvxferd.plan.sender import sender_plan
from kvxferd.plan.topology import TransferTopology, format_terms
from kvxferd.plan.transfer_info import EngineTransferInfo, MambaEngineTransferInfo, stage_infos

__all__ = [
    "MAX_RUNS",
    "BlockRules",
    "EngineTransferInfo",
    "Expander",
    "ListRules",
    "MambaEngineTransferInfo",
    "PieceRules",
    "Plan",
    "PlanJob",
    "PlanKey",
    "PlannedReads",
    "RegisteredEngine",
    "Runs",
    "SourceLists",
    "TransferTopology",
    "block_rules",
    "check_blocks",
    "check_engine",
    "check_open_blocks",
    "check_request",
    "check_same_engine",
    "covered_tokens",
    "decode_plan",
    "digest_of_layouts",
    "encode_plan",
    "engine_rules",
    "find_differences",
    "format_terms",
    "has_all_blocks",
    "list_rules",
    "make_plan",
    "plan_bytes",
    "require_pp_aware",
    "sender_plan",
    "set_xfer_handshake_metadata_pp_aware",
    "stage_infos",
]
