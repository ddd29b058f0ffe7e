"""`kvxferd doctor` in real surroundings: what it finds, what it advises, and how it ends."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from kvxferd.mover.ucx_settings import tls_with_cuda
from kvxferd.tooling.daemon_process import DaemonProcess
from tests.support.doctor_harness import examine
from tests.support.nodes.processes import stopped
from tests.support.other_user import needs_root, run_as_nobody
from tests.support.python_process import run_kvxferd


def test_without_a_gpu_placements_are_not_tried_and_the_status_says_so():
    found = examine("--gpu", "--driver", "none", "--check", "gpus")
    assert found.status == 3
    assert {finding["name"] for finding in found.findings} == {"gpus"}
    assert found.of("gpu")["verdict"] == "no"


def test_nixl_that_cannot_be_imported_is_a_finding(tmp_path: Path):
    for name in ("nixl", "rixl"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise ImportError('{name} is broken here')")
    found = examine("--check", "software", "--check", "same_node", environment={"PYTHONPATH": str(tmp_path)})
    assert found.status == 1
    assert "nixl is broken here" in found.of("nixl")["found"]
    assert "kvxferd[daemon,nixl]" in found.of("nixl")["todo"]
    assert found.of("same_node")["verdict"] == "no"


def test_transports_that_the_operator_has_narrowed_are_named_as_the_reason():
    found = examine("--check", "same_node", environment={"UCX_TLS": tls_with_cuda("tcp")})
    slow = found.of("same_node")
    assert (slow["verdict"], slow["facts"]["over_tcp"]) == ("warn", True)
    assert f"UCX_TLS={tls_with_cuda('tcp')} is set" in slow["todo"]
    assert found.status == 0, "slow is not broken"


def test_a_configuration_that_the_daemon_would_refuse(tmp_path: Path):
    path = tmp_path / "kvxferd.toml"
    path.write_text("[transfer]\nlease = 3\n")
    found = examine("--config", str(path), "--check", "memlock")
    assert found.status == 1
    assert "lease_s" in found.of("configuration")["found"]


IMPORTS = """
import resource
from kvxferd.tooling.control_client import ControlClient
from kvxferd.doctor.host import memlock, run_directory, shared_memory
from kvxferd.doctor.report import CheckContext
from kvxferd.config import Config
from kvxferd.config.schema import NodeConfig
resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
"""
FIND = """
config = Config(node=NodeConfig(run_dir="/root-only/kvxferd"))
context = CheckContext(config, ControlClient("/nowhere"), {"UCX_POSIX_DIR": "/proc"})
for finding in globals()[sys.argv[1]](context):
    print(finding.verdict, finding.found, finding.todo)
"""


@needs_root
@pytest.mark.parametrize(
    ("check", "begins", "holds"),
    [
        ("memlock", "warn limit 65.5 kB", "LimitMEMLOCK=infinity"),  # which root passes
        ("run_directory", "no uid 65534 cannot make /root-only/kvxferd", "RuntimeDirectory="),
        ("shared_memory", "warn /proc cannot be written by uid 65534", "mount a tmpfs"),
    ],
)
def test_what_root_may_and_another_user_may_not(check: str, begins: str, holds: str):
    said = run_as_nobody(FIND, check, imports=IMPORTS)
    assert said.startswith(begins)
    assert holds in said


def test_a_check_that_there_is_not():
    done = run_kvxferd("doctor", "--check", "weather")
    assert done.returncode == 2
    assert "cannot check weather: there are software, kernel" in done.stderr


@pytest.fixture
def namespaces() -> None:
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("namespaces need root and unshare")
    if subprocess.run(["unshare", "--net", "true"], check=False).returncode:
        pytest.skip("no network namespaces here")


@pytest.mark.netns
@pytest.mark.usefixtures("namespaces")
def test_no_network_at_all_is_found_and_named():
    found = examine("--check", "tcp", "--check", "cards", prefix=("unshare", "--net"))
    assert found.status == 1
    tcp = found.of("tcp")
    assert (tcp["verdict"], tcp["essential"]) == ("no", True)
    assert "loopback" in tcp["todo"]


def test_a_daemon_that_runs_says_what_it_is_and_one_that_is_stuck_is_a_finding(tmp_path: Path):
    daemon = DaemonProcess(tmp_path)
    flags = ("--socket", daemon.control.socket_path, "--check", "answering")
    try:
        daemon.wait_ready()
        found = examine(*flags)
        with stopped([daemon.pid]):
            stuck = examine(*flags)
    finally:
        daemon.stop()
    assert found.status == 0
    assert "ready at tcp://127.0.0.1:" in found.of("daemon")["found"]
    assert "has not answered for 5 s" in stuck.of("daemon")["found"]


def test_the_backend_is_shown_with_the_plugins():
    found = examine("--check", "software")
    backend = found.of("backend")
    assert (backend["verdict"], backend["facts"]["backend"]) == ("ok", "UCX")
    assert "UCX" in backend["facts"]["choices"]
    assert "POSIX" not in backend["facts"]["choices"], "it moves files"
    assert "ucx_devices" in backend["facts"]["parameters"]
    changed = {"KVXFERD_MOVER_BACKEND_PARAMETERS": "num_workers=1,ucx_device=eth0"}
    backend = examine("--check", "software", environment=changed).of("backend")
    assert backend["verdict"] == "warn"
    assert "does not list ucx_device of" in backend["found"]


def test_a_backend_that_is_not_there_is_a_failure_that_names_those_that_are():
    found = examine("--check", "software", environment={"KVXFERD_MOVER_BACKEND": "NONE_SUCH"})
    assert found.status == 1
    assert "cannot use mover.backend = NONE_SUCH: there is no such plugin" in found.of("nixl")["found"]
    assert "UCX" in found.of("nixl")["found"]
    assert "setting" in found.of("nixl")["todo"]
