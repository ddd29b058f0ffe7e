"""Who reads which bytes of whom: plans from layouts, runs from block ids. Pure arithmetic."""

from kvxferd.plan.aggregation import (
    check_engine,
    check_same_engine,
    require_pp_aware,
    set_xfer_handshake_metadata_pp_aware,
)
from kvxferd.plan.cache import PlanCache
from kvxferd.plan.differences import Difference, find_differences
from kvxferd.plan.expand import Expander, Runs
from kvxferd.plan.planner import make_plan
from kvxferd.plan.reads import Read, plan_reads
from kvxferd.plan.requests import check_blocks, check_request
from kvxferd.plan.structs import Plan, decode_plan, encode_plan
from kvxferd.plan.topology import EngineTransferInfo, TransferTopology, stage_infos

__all__ = [
    "Difference",
    "EngineTransferInfo",
    "Expander",
    "Plan",
    "PlanCache",
    "Read",
    "Runs",
    "TransferTopology",
    "check_blocks",
    "check_engine",
    "check_request",
    "check_same_engine",
    "decode_plan",
    "encode_plan",
    "find_differences",
    "make_plan",
    "plan_reads",
    "require_pp_aware",
    "set_xfer_handshake_metadata_pp_aware",
    "stage_infos",
]
