"""The explanation as one JSON object."""

from __future__ import annotations

from typing import Any

from kvxferd.explain.analysis import DecodeRankReads, Explanation, RankRead
from kvxferd.explain.byte_ranges import ByteRanges
from kvxferd.explain.sends import RankSends, Send


def explanation_json(explanation: Explanation, ranges: list[ByteRanges] | None = None) -> dict[str, Any]:
    """Return `ranks` and `sends`, or `refused`; with `ranges`, also `byte_ranges` of the requested rank."""
    about: dict[str, Any] = {"prefill": explanation.prefill.label, "decode": explanation.decode.label}
    if explanation.refused:
        return about | {"refused": [refusal._asdict() for refusal in explanation.refused]}
    about["link"] = explanation.link
    about["advice"] = explanation.advice
    about["bytes_per_1000_tokens"] = explanation.num_bytes
    about["ranks"] = [_rank(rank) for rank in explanation.ranks]
    about["sends"] = [_sends(sends) for sends in explanation.sends]
    about["notes"] = list(explanation.notes)
    if ranges is not None:
        about["byte_ranges"] = [_ranges(item) for item in ranges]
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


def _sends(sends: RankSends) -> dict[str, Any]:
    return {"prefill_rank": list(sends.rank), "to": [_send(send) for send in sends.to]}


def _send(send: Send) -> dict[str, Any]:
    return {
        "decode_rank": list(send.decode_rank),
        "bytes_per_1000_tokens": send.num_bytes,
        "runs_per_1000_tokens": send.num_runs,
    }


def _ranges(item: ByteRanges) -> dict[str, Any]:
    return {
        "prefill_rank": list(item.source),
        "for": item.kind.value,
        "layer": item.layer,
        "component": item.component,
        "units": [item.units.start, item.units.stop],
        "decode_region": item.decode_region,
        "prefill_region": item.prefill_region,
        "decode_block_stride": item.decode_block_stride,
        "prefill_block_stride": item.prefill_block_stride,
        "runs": [
            {"decode_offset": local, "prefill_offset": remote, "bytes": length}
            for local, remote, length in item.runs
        ],
    }
