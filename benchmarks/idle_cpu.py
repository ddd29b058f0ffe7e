"""CPU time and memory of an idle daemon with eight ranks registered and a peer connected."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path

from kvxferd import client
from kvxferd.bench.proc_stats import cpu_seconds, private_bytes, process_tree, resident_bytes
from kvxferd.errors import KvxferdError
from kvxferd.layout import EngineSpec
from kvxferd.layout.presets import attention_layout
from kvxferd.memory import SealedMemory
from kvxferd.tooling.control_client import ControlClient

NUM_RANKS = 8
MIB = 1 << 20
LAYOUT_OPTIONS = {"num_kv_heads": 8, "head_dim": 128, "block_tokens": 16, "num_blocks": 64, "layout": "HND"}


def start_daemon(stack: ExitStack, directory: Path) -> tuple[subprocess.Popen[bytes], ControlClient]:
    """Start a daemon and return it when it is ready."""
    command = [sys.executable, "-m", "kvxferd.cli", "serve", "--node-run-dir", str(directory)]
    command += ["--http-bind", "", "--peer-bind", "tcp://127.0.0.1:0", "--log-level", "error"]
    process = subprocess.Popen(command)
    stack.callback(process.wait)
    stack.callback(process.terminate)
    control = ControlClient(str(directory / "control.sock"))
    while True:
        with suppress(KvxferdError):
            if control.request("GET", "/readyz")[0] == 200:
                return process, control
        time.sleep(0.05)


def register(stack: ExitStack, socket: str, name: str, tp_size: int) -> list[client.RankHandle]:
    """Register all ranks of an engine, in this process."""
    ranks = []
    for tp_rank in range(tp_size):
        spec = EngineSpec(name, "g", num_layers=4, tp_size=tp_size, tp_rank=tp_rank, num_kv_heads=8)
        layout = attention_layout(spec=spec, **LAYOUT_OPTIONS)
        memory = stack.enter_context(SealedMemory.create(layout.regions[0].size_bytes, name))
        connected = stack.enter_context(client.connect(socket))
        ranks.append(
            connected.register(engine=spec, layout=layout, regions={layout.regions[0].region: memory})
        )
    return ranks


def pull_once(source: client.RankHandle, sinks: list[client.RankHandle]) -> None:
    """Pull once, so that the two daemons are connected."""
    blocks = {"full": client.BlockList(first_token=0, ids=[1, 2, 3])}
    ref = source.publish("t", blocks=blocks, num_tokens=48)
    for sink in sinks:
        sink.pull(ref, blocks=blocks, num_tokens=48, deadline_s=20)
    for sink in sinks:
        while not (events := sink.poll()):
            time.sleep(0.01)
        assert isinstance(events[0], client.Delivered), events


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for name in ("a", "b"):
            (directory / name).mkdir()
        daemon, _ = start_daemon(stack, directory / "a")
        start_daemon(stack, directory / "b")
        sinks = register(stack, str(directory / "a" / "worker" / "worker.sock"), "decode", NUM_RANKS)
        (source,) = register(stack, str(directory / "b" / "worker" / "worker.sock"), "prefill", 1)
        pull_once(source, sinks)
        time.sleep(5)  # past the time for which a source goes on polling after a read
        pids = process_tree(daemon.pid)
        before, began = {pid: cpu_seconds(pid) for pid in pids}, time.monotonic()
        time.sleep(options.seconds)
        elapsed = time.monotonic() - began
        used = {pid: cpu_seconds(pid) - before[pid] for pid in pids}
        print(
            f"{NUM_RANKS} ranks registered, one peer known, idle for {elapsed:.0f} s, {len(pids)} processes"
        )
        print(f"  daemon           {100 * used[daemon.pid] / elapsed:.3f} % of a core")
        print(f"  daemon + movers  {100 * sum(used.values()) / elapsed:.3f} % of a core")
        print(f"  daemon RSS       {resident_bytes(daemon.pid) / MIB:.0f} MiB")
        parent, *movers = pids[1:]
        print(f"  movers' parent   {resident_bytes(parent) / MIB:.0f} MiB RSS")
        private = [private_bytes(p) / MIB for p in movers]
        spread = f"{min(private):.1f} to {max(private):.1f}"
        print(f"  each mover       {spread} MiB private, {len(private)} of them")


if __name__ == "__main__":
    main()
