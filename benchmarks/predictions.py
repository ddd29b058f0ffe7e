"""How well pulls are predicted: python -m benchmarks.predictions [ROUNDS].

The bench's pairs of layouts, and equal ones, over CMA: in each round pulls of 4 and 64 MiB in each pattern of
blocks, and of 1,000 tokens with scattered blocks, which `explain` predicts. Measured: from the first post to
the last copy. Printed: the shares of predictions within 30 %, and the median of predicted by measured.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from kvxferd.bench.cases import MIB, BlockPattern, Case
from kvxferd.bench.contenders import KvxferdPulls, verify_all_bytes
from kvxferd.bench.measures.layouts import ALL_LAYOUTS, Layouts, pair_of, request_tokens
from kvxferd.bench.testbed import RunningEngines, Site, Testbed
from kvxferd.explain.analysis import explain_pair
from kvxferd.explain.engine_spec_parser import EngineDescription
from kvxferd.explain.read_estimate import REQUEST_TOKENS

Ratios = dict[tuple[str, str, str, str], list[float]]


def main() -> None:
    """Pull, and print the shares."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    ratios: Ratios = defaultdict(list)
    with tempfile.TemporaryDirectory() as directory, Testbed.open(Site(Path(directory), "cma")) as testbed:
        for number, unlike in enumerate(ALL_LAYOUTS):
            for kind, layouts in (("unlike", unlike), ("equal", Layouts(unlike.decode, unlike.decode))):
                pair = pair_of(f"{kind}-{number}", layouts, request_tokens(unlike, 64 * MIB))
                with testbed.engines(pair) as engines:
                    measure(engines, unlike, kind, rounds, ratios)
    for key, found in ratios.items():
        within = sum(1 / 1.3 <= one <= 1.3 for one in found) / len(found)
        print(f"{' '.join(key):48} {within:4.0%} of {len(found):3}, median {statistics.median(found):.2f}")


def measure(engines: RunningEngines, layouts: Layouts, kind: str, rounds: int, ratios: Ratios) -> None:
    """Add the ratios of one pair of engines."""
    prefill, decode = (EngineDescription(role, engines.pair.engine(role)) for role in ("prefill", "decode"))
    explained = {tuple(one.rank): one.predicted_s for one in explain_pair(prefill, decode).ranks}
    cases = [
        (f"{size} MiB", pattern, request_tokens(layouts, size * MIB))
        for size in (4, 64)
        for pattern in BlockPattern
    ]
    cases.append(
        ("1,000 tokens", BlockPattern.SCATTERED, request_tokens(layouts, REQUEST_TOKENS * 16 * 1024))
    )
    path = f"/v1/history?kind=pull&engine={engines.pair.name}-decode&limit=512"
    num_seen = 0
    for number in range(rounds):
        for size, pattern, tokens in cases:
            case = Case(engines.pair, pattern, tokens // engines.pair.prefill.block_tokens)
            verify_all_bytes(KvxferdPulls(engines, case))
            records: list[dict[str, Any]] = engines.testbed.daemons["decode"].control.get(path)["records"]
            for record in records[num_seen:]:
                took_s = record["phases_s"]["post"] + record["phases_s"]["wire"]
                when = "first" if number == 0 else "later"
                if record.get("predicted_s"):
                    ratios["record", kind, size, when].append(record["predicted_s"] / took_s)
                if size == "1,000 tokens":
                    ratios["explain", kind, size, when].append(
                        explained[tuple(record["rank"])] * tokens / REQUEST_TOKENS / took_s
                    )
            num_seen = len(records)


if __name__ == "__main__":
    main()
