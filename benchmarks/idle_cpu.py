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
from kvxferd.cli.asking import Daemon
from kvxferd.errors import KvxferdError
from kvxferd.layout import EngineSpec
from kvxferd.layout.presets import attention_layout
from kvxferd.memory import SealedMemory

NUM_RANKS = 8
FACTS = {"num_kv_heads": 8, "head_dim": 128, "block_tokens": 16, "num_blocks": 64, "layout": "HND"}


def start(stack: ExitStack, directory: Path) -> tuple[subprocess.Popen[bytes], Daemon]:
    """A daemon that is ready."""
    command = [sys.executable, "-m", "kvxferd.cli", "serve", "--node-run-dir", str(directory)]
    command += ["--http-bind", "", "--peer-bind", "tcp://127.0.0.1:0", "--log-level", "error"]
    process = subprocess.Popen(command)
    stack.callback(process.wait)
    stack.callback(process.terminate)
    control = Daemon(str(directory / "control.sock"))
    while True:
        with suppress(KvxferdError):
            if control.ask("GET", "/readyz")[0] == 200:
                return process, control
        time.sleep(0.05)


def register(stack: ExitStack, socket: str, name: str, tp_size: int) -> list[client.RankHandle]:
    """All ranks of an engine, in this process."""
    ranks = []
    for tp_rank in range(tp_size):
        spec = EngineSpec(name, "g", num_layers=4, tp_size=tp_size, tp_rank=tp_rank, num_kv_heads=8)
        layout = attention_layout(spec=spec, **FACTS)
        memory = stack.enter_context(SealedMemory.create(layout.regions[0].size_bytes, name))
        connected = stack.enter_context(client.connect(socket))
        ranks.append(
            connected.register(engine=spec, layout=layout, regions={layout.regions[0].region: memory})
        )
    return ranks


def tree(pid: int) -> list[int]:
    """The process and all its descendants."""
    children = [
        int(child)
        for task in Path(f"/proc/{pid}/task").iterdir()
        for child in (task / "children").read_text().split()
    ]
    return [pid, *(p for child in children for p in tree(child))]


def cpu_s(pid: int) -> float:
    """Time on a processor of all threads of a process, from the scheduler: in nanoseconds, not ticks."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def memory_mib(pid: int, key: str) -> float:
    """One line of the process's smaps_rollup."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) / 1024
    raise KeyError(key)


def pull_once(source: client.RankHandle, sinks: list[client.RankHandle]) -> None:
    """Make the daemons know each other."""
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
        daemon, _ = start(stack, directory / "a")
        start(stack, directory / "b")
        sinks = register(stack, str(directory / "a" / "worker.sock"), "decode", NUM_RANKS)
        (source,) = register(stack, str(directory / "b" / "worker.sock"), "prefill", 1)
        pull_once(source, sinks)
        time.sleep(5)  # past the lingering attention
        pids = tree(daemon.pid)
        before, began = {pid: cpu_s(pid) for pid in pids}, time.monotonic()
        time.sleep(options.seconds)
        elapsed = time.monotonic() - began
        used = {pid: cpu_s(pid) - before[pid] for pid in pids}
        print(
            f"{NUM_RANKS} ranks registered, one peer known, idle for {elapsed:.0f} s, {len(pids)} processes"
        )
        print(f"  daemon           {100 * used[daemon.pid] / elapsed:.3f} % of a core")
        print(f"  daemon + movers  {100 * sum(used.values()) / elapsed:.3f} % of a core")
        print(f"  daemon RSS       {memory_mib(daemon.pid, 'Rss'):.0f} MiB")
        parent, *movers = pids[1:]
        print(f"  movers' parent   {memory_mib(parent, 'Rss'):.0f} MiB RSS")
        private = [memory_mib(p, "Private_Dirty") for p in movers]
        spread = f"{min(private):.1f} to {max(private):.1f}"
        print(f"  each mover       {spread} MiB private dirty, {len(private)} of them")


if __name__ == "__main__":
    main()
