"""vLLM with its own NIXL connector and with kvxferd's, in turn, from cold starts.

    KVXFERD_VLLM_PYTHON=.venv-vllm/bin/python .venv/bin/python -m benchmarks.vllm_side_by_side --rounds 5

A round starts a prefill and a decode engine (for kvxferd a daemon each), sends one request as soon as
both respond, then more, one at a time, then lets them idle. A request is sent as a router would: one
token from the prefill engine, then the prompt with the reply's parameters to the decode engine. The time
is the second one's: from the request to its first token. Prompts share no prefix, so the whole cache moves.
A failed load fails the request (vLLM's default), so that failures show.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kvxferd.bench.proc_stats import cpu_seconds, process_tree
from tests.support.vllm_servers.completions import RequestFailed, complete, decode, prefill, prompt_of
from tests.support.vllm_servers.engines import Engine, Served, kvxferd_connector, nixl_connector
from tests.support.vllm_servers.site import Site

CONNECTORS = ("NixlConnector", "KvxferdConnector")
LENGTH = 700  # 1.4 MB of cache in 22 blocks: 2 KiB a token
IDLE_AFTER_S = 3.0


@dataclass(frozen=True)
class Round:
    """The result of one cold start. Times in seconds, CPU in percent of a core, both engines together."""

    connector: str
    engines_ready_s: float
    first_s: float
    first_failed: bool
    later_s: list[float]
    later_failed: int
    alone_s: float
    idle_cpu_percent: float
    load_before: float


def main() -> None:
    """Measure and print."""
    options = _options()
    with tempfile.TemporaryDirectory(prefix="kvxferd-vllm-") as scratch:
        rounds: list[Round] = []
        for number in range(options.rounds):
            # The order alternates, so that neither always follows the other.
            for connector in CONNECTORS if number % 2 == 0 else reversed(CONNECTORS):
                directory = Path(scratch) / f"{connector}-{number}"
                rounds.append(one_round(connector, directory, options))
                print(json.dumps(asdict(rounds[-1])), file=sys.stderr, flush=True)
    if options.json:
        print(json.dumps({"rounds": [asdict(r) for r in rounds], "summary": summary(rounds)}))
    else:
        show(rounds)


def one_round(connector: str, directory: Path, options: argparse.Namespace) -> Round:
    """Start everything cold, measure, and end everything."""
    load = os.getloadavg()[0]
    with ExitStack() as stack:
        site = Site(directory, options.python)
        stack.callback(site.stop)
        engines = start(site, connector, Path(options.model) if options.model else site.model("llama"))
        for engine in engines:
            engine.wait()
        ready_s = max(engine.ready_after_s for engine in engines)
        first, *later = [timed(engines, seed) for seed in range(options.requests + 1)]
        alone = [timed_alone(engines[1], 10_000 + seed) for seed in range(5)]
        time.sleep(IDLE_AFTER_S)
        idle = idle_cpu_percent(site, options.idle_s)
        worked = [seconds for seconds, failed in later if not failed]
        return Round(
            connector, ready_s, *first, worked, len(later) - len(worked), statistics.median(alone), idle, load
        )


def start(site: Site, connector: str, model: Path) -> list[Engine]:
    """Start the prefill and the decode engine; they need not be ready."""
    if connector == "KvxferdConnector":
        sockets = [site.daemon(name).worker_socket for name in ("node-p", "node-d")]
        configs = [kvxferd_connector(sockets[0], "kv_producer"), kvxferd_connector(sockets[1], "kv_consumer")]
    else:
        configs = [nixl_connector("kv_producer"), nixl_connector("kv_consumer")]
    return [
        # Held to one core, the connector whose agents spin in the engines would slow its own engine down.
        site.engine(name, Served(model, config, on_all_cores=True))
        for name, config in zip(("prefill", "decode"), configs, strict=True)
    ]


def timed(engines: Sequence[Engine], seed: int) -> tuple[float, bool]:
    """Return the seconds to the decode engine's first token or error, and whether it was an error."""
    prompt = prompt_of(LENGTH, seed)
    params = prefill(engines[0].url, prompt)
    started = time.monotonic()
    try:
        reply = decode(engines[1].url, prompt, params, max_tokens=4, stream=True)
    except RequestFailed:
        return time.monotonic() - started, True
    assert reply.first_token_s is not None
    return reply.first_token_s, False


def timed_alone(engine: Engine, seed: int) -> float:
    """Return the seconds to the first token where the decode engine computes the prompt itself."""
    reply = complete(engine.url, prompt_of(LENGTH, seed), 4, stream=True)
    assert reply.first_token_s is not None
    return reply.first_token_s


def idle_cpu_percent(site: Site, seconds: float) -> float:
    """Return the CPU use of all engines, daemons and movers together while no request runs."""
    roots = [engine.pid for engine in site.engines] + [node.pid for node in site.daemons]
    pids = [pid for root in roots for pid in process_tree(root)]
    before, started = sum(map(cpu_seconds, pids)), time.monotonic()
    time.sleep(seconds)
    return 100 * (sum(map(cpu_seconds, pids)) - before) / (time.monotonic() - started)


def summary(rounds: Sequence[Round]) -> dict[str, dict[str, float]]:
    """Return the figures of each connector, over its rounds."""
    found = {}
    for connector in CONNECTORS:
        own = [r for r in rounds if r.connector == connector]
        later = [seconds for r in own for seconds in r.later_s]
        found[connector] = {
            "cold_starts": len(own),
            "first_s_median": statistics.median(r.first_s for r in own),
            "first_s_least": min(r.first_s for r in own),
            "first_s_most": max(r.first_s for r in own),
            "first_failed": sum(r.first_failed for r in own),
            "later_ms_median": 1e3 * statistics.median(later) if later else float("nan"),
            "later_ms_p90": 1e3 * statistics.quantiles(later, n=10)[-1] if len(later) > 1 else float("nan"),
            "later_requests": len(later) + sum(r.later_failed for r in own),
            "later_failed": sum(r.later_failed for r in own),
            "alone_ms_median": 1e3 * statistics.median(r.alone_s for r in own),
            "idle_cpu_percent_median": statistics.median(r.idle_cpu_percent for r in own),
            "engines_ready_s_median": statistics.median(r.engines_ready_s for r in own),
            "load_before_median": statistics.median(r.load_before for r in own),
        }
    return found


ROWS: tuple[tuple[str, Callable[[dict[str, float]], str]], ...] = (
    ("cold starts", lambda s: f"{s['cold_starts']}"),
    ("first token of the first request, median", lambda s: f"{s['first_s_median']:.2f} s"),
    ("  least and most", lambda s: f"{s['first_s_least']:.2f} to {s['first_s_most']:.2f} s"),
    ("  failed", lambda s: f"{s['first_failed']}"),
    ("first token of later ones, median", lambda s: f"{s['later_ms_median']:.0f} ms"),
    ("  90th percentile", lambda s: f"{s['later_ms_p90']:.0f} ms"),
    ("  failed", lambda s: f"{s['later_failed']} of {s['later_requests']}"),
    ("the decode engine computing it itself", lambda s: f"{s['alone_ms_median']:.0f} ms"),
    ("idle CPU, everything together", lambda s: f"{s['idle_cpu_percent_median']:.1f} % of a core"),
    ("both engines up after", lambda s: f"{s['engines_ready_s_median']:.0f} s"),
    ("load before a start", lambda s: f"{s['load_before_median']:.1f}"),
)


def show(rounds: Sequence[Round]) -> None:
    """Print a table with a column for each connector."""
    found = summary(rounds)
    table = Table("", *CONNECTORS)
    for name, text in ROWS:
        table.add_row(name, *(text(found[connector]) for connector in CONNECTORS))
    Console().print(table)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--python", default=os.environ.get("KVXFERD_VLLM_PYTHON", ".venv-vllm/bin/python"))
    parser.add_argument("--model", default="", help="a checkpoint; the default is the tests' tiny Llama")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=20, help="after the first of a round")
    parser.add_argument("--idle-s", type=float, default=10.0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    options.python = str(Path(options.python).absolute())
    return options


if __name__ == "__main__":
    main()
