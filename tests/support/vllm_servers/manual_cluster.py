"""The rig by hand: daemons, a prefill and a decode engine, prompts through both; then it waits.

    KVXFERD_VLLM_PYTHON=.venv-vllm/bin/python .venv/bin/python \
        -m tests.support.vllm_servers.manual_cluster --directory rig

For each prompt it prints the tokens of the prefill engine alone and those that the decode engine
made of the moved cache. `--once` ends after the prompts; otherwise Ctrl-C ends everything.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import time
from pathlib import Path
from typing import Any

from tests.support.vllm_servers.completions import RequestFailed, complete, decode, prefill, prompt_of
from tests.support.vllm_servers.engines import Engine, Served, kvxferd_connector, nixl_connector
from tests.support.vllm_servers.site import Site
from tests.support.vllm_servers.tiny_models import KINDS


def main() -> None:
    """Start everything, ask, wait."""
    options = _options()
    directory = Path(options.directory).resolve()
    site = Site(directory, options.python)
    try:
        engines = _engines(options, site)
        for engine in engines:
            engine.wait()
            print(f"{engine.name}: {engine.url} pid {engine.pid} log {engine.log}", flush=True)
        for length in map(int, options.lengths.split(",")):
            _send_request(*engines, length)
        if not options.once:
            print("Ctrl-C ends the rig", flush=True)
            signal.sigwait({signal.SIGINT, signal.SIGTERM})
    finally:
        site.stop()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--python", default=os.environ.get("KVXFERD_VLLM_PYTHON", ".venv-vllm/bin/python"))
    parser.add_argument("--connector", choices=["kvxferd", "nixl"], default="kvxferd")
    parser.add_argument("--model", choices=sorted(KINDS), default="llama")
    parser.add_argument("--directory", default="rig", help="models, logs, the daemons' directories")
    parser.add_argument("--policy", default="", help="kv_load_failure_policy of the decode engine")
    parser.add_argument("--extra", default="{}", help="JSON added to kv_connector_extra_config")
    parser.add_argument("--prefill-flags", default="", help="more flags for vLLM")
    parser.add_argument("--decode-flags", default="")
    parser.add_argument("--prefill-block", type=int, default=32)
    parser.add_argument("--decode-block", type=int, default=32)
    parser.add_argument("--lengths", default="5,31,32,33,64,200,700")
    parser.add_argument("--log-level", default="INFO", help="vLLM's, such as DEBUG")
    parser.add_argument("--once", action="store_true")
    return parser.parse_args()


def _engines(options: argparse.Namespace, site: Site) -> list[Engine]:
    model = site.model(options.model)
    configs: list[dict[str, Any]]
    if options.connector == "kvxferd":
        nodes = [site.fleet.daemon(name, "--log-level", "debug") for name in ("node-p", "node-d")]
        for node in nodes:
            print(f"daemon: {node.worker_socket} log {node.log}", flush=True)
        extra = json.loads(options.extra)
        configs = [
            kvxferd_connector(nodes[0].worker_socket, "kv_producer", **extra),
            kvxferd_connector(nodes[1].worker_socket, "kv_consumer", options.policy, **extra),
        ]
    else:
        configs = [nixl_connector("kv_producer"), nixl_connector("kv_consumer", options.policy)]
    engines = []
    sides = [("prefill", options.prefill_block, options.prefill_flags)]
    sides += [("decode", options.decode_block, options.decode_flags)]
    for (name, block, flags), config in zip(sides, configs, strict=True):
        environ = {"VLLM_LOGGING_LEVEL": options.log_level}
        served = Served(model, config, block, flags=shlex.split(flags), environ=environ)
        engines.append(site.engine(name, served))
    return engines


def _send_request(prefill_engine: Engine, decode_engine: Engine, length: int) -> None:
    prompt = prompt_of(length, seed=length)
    try:
        alone = complete(prefill_engine.url, prompt).tokens
        params = prefill(prefill_engine.url, prompt)
        started = time.monotonic()
        moved = decode(decode_engine.url, prompt, params).tokens
    except RequestFailed as error:
        print(f"{length:5}  failed {error}", flush=True)
        return
    took = f"{1e3 * (time.monotonic() - started):.0f} ms"
    print(f"{length:5}  {'equal' if alone == moved else 'DIFFER'}  {took}  {alone}  {moved}", flush=True)
    print(f"       {json.dumps(params)[:300]}", flush=True)


if __name__ == "__main__":
    main()
