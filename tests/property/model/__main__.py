"""`make proofs ONLY=model`: explore every size up to a depth, one line of JSON each and one for all."""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter

from tests.property.model.search import Search
from tests.property.model.sizes import SIZES, upto


def main() -> None:
    """Print what was explored; a broken promise is a traceback with its steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--depth", type=int, choices=sorted(SIZES), default=2)
    parser.add_argument("--max-states", type=int, help="give up a size after so many states, and say so")
    requested = parser.parse_args()
    total: Counter[str] = Counter()
    for scenario in upto(requested.depth):
        begun = time.monotonic()
        found = Search(scenario).run(requested.max_states)
        line = {
            "scenario": scenario.settings(),
            **found.as_dict(),
            "seconds": round(time.monotonic() - begun, 1),
        }
        print(json.dumps(line), flush=True)
        total += Counter({k: int(v) for k, v in line.items() if k != "scenario"})
    print(json.dumps({"scenarios": len(upto(requested.depth)), **total, "violations": 0}))


main()
