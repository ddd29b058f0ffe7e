"""`kvxferd doctor --serve` and `--link`: a link between two real daemons, measured by pulls."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvxferd.client import TransferRef
from kvxferd.config import load_config
from kvxferd.doctor import link
from kvxferd.doctor.report import CheckContext
from kvxferd.layout.presets import deploy
from kvxferd.tooling.engine_process import EngineRank
from tests.support.doctor_harness import Examination, examine
from tests.support.nodes.daemon import Daemon
from tests.support.nodes.fleet import Fleet
from tests.support.nodes.requests import publish, spec_of
from tests.support.python_process import run_kvxferd
from tests.support.tool_process import start_tool, tool_directory

pytestmark = pytest.mark.timeout(180)

LIMIT_S = 60.0


@contextmanager
def serving(there: Daemon) -> Iterator[subprocess.Popen[str]]:
    """A server that is ended by Ctrl-C, unless the test has ended it."""
    with tool_directory() as place:
        server = start_tool(place, "doctor", "--serve", KVXFERD_NODE_RUN_DIR=str(there.directory))
        try:
            yield server
            server.send_signal(signal.SIGINT)
            _, err = server.communicate(timeout=LIMIT_S)
            assert (server.returncode, "Traceback" in err) == (0, False), err
        finally:
            server.kill()
            server.wait()


def printed(server: subprocess.Popen[str]) -> str:
    """The reference in the command that it prints."""
    assert server.stdout is not None
    *command, ref = shlex.split(server.stdout.readline())
    assert command == ["kvxferd", "doctor", "--link"]
    return ref


def measure(here: Daemon, ref: str) -> Examination:
    return examine("--link", ref, environment={"KVXFERD_NODE_RUN_DIR": str(here.directory)})


def failure(here: Daemon, ref: Any) -> dict[str, Any]:
    found = measure(here, json.dumps(ref))
    assert found.status == 1
    failed = found.of("link")
    assert failed["verdict"] == "no"
    return failed


def test_a_link_is_measured_as_often_as_wanted_and_nothing_is_left(fleet: Fleet) -> None:
    here, there = fleet.shared("decode"), fleet.shared("prefill")
    with serving(there) as server:
        ref = printed(server)
        for _ in range(2):
            found = measure(here, ref)
            assert found.status == 0, found.findings
            facts = found.of("link")["facts"]
            assert facts["gigabytes_per_s"] > 0
            assert (facts["bytes"], facts["pulls"]) == (64 << 20, link.NUM_PULLS)
            assert (facts["transports"], facts["reach"]) == ("cma", "node")
        assert failure(here, json.loads(ref) | {"nonce": "0" * 32})["facts"]["code"] == "nonce-wrong"
    released = there.history(transfer=json.loads(ref)["transfer_id"])
    assert [record["why"] for record in released] == ["unpublished"]
    assert "doctor --serve" in failure(here, json.loads(ref))["todo"]


def test_blocks_of_another_engine_are_no_measure(fleet: Fleet) -> None:
    here, there = fleet.shared("decode"), fleet.shared("prefill")
    ref = publish(fleet.engine(there, spec_of("other")), 1)
    failed = failure(here, ref)
    assert failed["facts"]["code"] == "layout-incompatible"
    assert "doctor --serve" in failed["todo"]


def test_wrong_bytes_are_found(fleet: Fleet) -> None:
    here, there = fleet.shared("decode"), fleet.shared("prefill")
    ((spec, layout),) = deploy(
        link.MODEL, block_tokens=link.BLOCK_TOKENS, num_blocks=link.NUM_BLOCKS, engine_id="liar",
        generation=fleet.generation(),
    ).values()  # fmt: skip
    with closing(EngineRank()) as liar:
        liar.register(there.worker_socket, spec, layout)
        liar.write(link.REQUEST)
        liar.store.bytes[-1] ^= 1
        ref = liar.publish("one-bit", link.REQUEST)
        failed = failure(here, msgspec.to_builtins(ref))
        assert failed["facts"]["wrong_items"] == 1
        assert "layer 15" in failed["found"]


def test_a_server_that_is_forgotten_ends(fleet: Fleet) -> None:
    there = fleet.shared("prefill")
    config = load_config(None, {}, {"node.run_dir": str(there.directory)})
    refs: list[TransferRef] = []
    link.serve_link(CheckContext(config, there.control, {}), refs.append, for_s=0.0)
    (released,) = there.history(transfer=refs[0].transfer_id, kind="release")
    assert released["why"] == "unpublished"


def test_without_a_daemon_there_is_no_server(tmp_path: Path) -> None:
    done = run_kvxferd("doctor", "--serve", "--socket", tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "[daemon-lost]" in done.stderr
