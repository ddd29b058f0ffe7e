"""The explanation as one JSON object."""

from __future__ import annotations

from typing import Any

import msgspec

from kvxferd.explain.analysis import DecodeRankReads, Explanation, RankRead
from kvxferd.explain.byte_ranges import ByteRanges, byte_ranges


def explanation_json(
    explanation: Explanation,
    reader: DecodeRankReads | None = None,
    sends: list[ByteRanges] | None = None,
) -> dict[str, Any]:
    """Return `ranks`, or `refused`; `terms` and `byte_ranges` of a decode rank; those that are sent."""
    about: dict[str, Any] = {"prefill": explanation.prefill.label, "decode": explanation.decode.label}
    if explanation.refused:
        return about | {"refused": [refusal._asdict() for refusal in explanation.refused]}
    about["link"] = explanation.link
    about["advice"] = explanation.advice
    about["bytes_per_1000_tokens"] = explanation.num_bytes
    about["ranks"] = [_rank(rank) for rank in explanation.ranks]
    about["notes"] = list(explanation.notes)
    if reader is not None:
        about["terms"] = msgspec.to_builtins(reader.terms())
        about["byte_ranges"] = msgspec.to_builtins(byte_ranges(reader.plan))
    if sends is not None:
        about["sent_byte_ranges"] = msgspec.to_builtins(sends)
    return about


def _rank(rank: DecodeRankReads) -> dict[str, Any]:
    return {
        "decode_rank": list(rank.rank),
        "start_layer": rank.layers[0],
        "end_layer": rank.layers[1],
        "bytes_per_1000_tokens": rank.num_bytes,
        "runs_per_1000_tokens": rank.num_runs,
        "reads": [_read(read) for read in rank.reads],
    }


def _read(read: RankRead) -> dict[str, Any]:
    return {
        "prefill_rank": list(read.source),
        "for": read.kind.value,
        "start_layer": read.layers[0],
        "end_layer": read.layers[-1] + 1,
        "num_layers": len(read.layers),
        "units": {name: [[r.start, r.stop] for r in held] for name, held in read.units.items()},
        "bytes_per_1000_tokens": read.num_bytes,
        "runs_per_1000_tokens": read.num_runs,
        "runs_per_1000_tokens_if_blocks_in_a_row": read.fewest_runs,
        "mean_run_bytes": round(read.mean_run_bytes, 1),
        "merges": read.merges,
        "way": read.estimate.way,
        "covering_factor": round(read.estimate.covering_factor, 3),
        "descriptors_direct": read.estimate.descriptors_direct,
        "descriptors_posted": read.estimate.descriptors_posted,
        "predicted_ms": round(1e3 * read.estimate.predicted_s, 3),
    }
