"""Who reads which bytes of whom: plans from layouts, runs from block ids. Pure arithmetic."""

from kvxferd.plan.expand import Expander, Runs
from kvxferd.plan.planner import make_plan
from kvxferd.plan.structs import Plan, decode_plan, encode_plan

__all__ = [
    "Expander",
    "Plan",
    "Runs",
    "decode_plan",
    "encode_plan",
    "make_plan",
]
