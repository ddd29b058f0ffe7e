"""Engine ids, run directories, sockets: who had them first, and who still holds them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import time
from pathlib import Path

from kvxferd.memory import SealedMemory
from kvxferd.wire import worker
from tests.proofs.hostile.attacker import Scene
from tests.proofs.hostile.attacks.floods import newcomer
from tests.proofs.hostile.raw_protocol import WorkerByHand
from tests.proofs.hostile.registry import attack

RESTART = "the daemon was restarted: pulls that ran then end"


def back(scene: Scene, limit_s: float = 25.0) -> str:
    """Whether the honest pair delivers again."""
    before = scene.send_request("traffic")["done"]
    until = time.monotonic() + limit_s
    while time.monotonic() < until:
        if scene.send_request("traffic")["done"] >= before + 6:
            return ""
        scene.send_request("pump", seconds=0.2)
    return f"the honest pair does not come back: {scene.send_request('traffic')['why']}"


@attack("operator", allows_failed_pulls=RESTART, limit_s=60.0)
def a_restart(scene: Scene) -> str:
    """No attack: the daemon is killed and started, and the honest pair must come back."""
    return scene.send_request("restart", node="a") or back(scene)


@attack("user", allows_failed_pulls=RESTART, limit_s=60.0)
def an_id_squatted_after_a_restart(scene: Scene) -> str:
    """As the daemon restarts somebody of another user registers the live engine's id first, and holds it."""
    scene.send_request("kill", node="a")
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            _squat(scene.a.worker_socket)
        os._exit(0)
    scene.rest(0.3)
    scene.send_request("start", node="a")
    done = back(scene, 35.0)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return done


def _squat(path: str) -> None:
    until = time.monotonic() + 25.0
    kept: list[WorkerByHand] = []
    while time.monotonic() < until and len(kept) < 40:
        try:
            made = WorkerByHand(path)
            reply = made.register("honest-0", generation=f"squatted-{len(kept)}")
        except OSError:
            time.sleep(0.002)
            continue
        if isinstance(reply, worker.Registered):
            kept.append(made)
            time.sleep(1.0)
            made.close()  # one second is enough
            return
        made.close()
        time.sleep(0.01)


@attack("stranger", allows_failed_pulls=RESTART, limit_s=80.0)
def locks_held_by_a_stranger(scene: Scene) -> str:
    """A stranger locks whatever it can open in the run directory, and the daemon restarts."""
    held = []
    for path in [Path(scene.a.run_directory), *Path(scene.a.run_directory).glob("**/*")]:
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            held.append(fd)
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    child = os.fork()  # the locks that daemon and movers hold now are waited for
    if child == 0:
        for fd in held:
            if os.fork() == 0:
                with contextlib.suppress(OSError):
                    fcntl.flock(fd, fcntl.LOCK_EX)
                    time.sleep(60.0)
                os._exit(0)
        time.sleep(60.0)
        os._exit(0)
    scene.rest(0.3)
    return scene.send_request("restart", node="a", limit_s=20.0) or back(scene)


@attack("user", allows_failed_pulls=RESTART, limit_s=80.0)
def locks_held_by_a_user(scene: Scene) -> str:
    """As by a stranger, with the rights of the worker socket's group."""
    return locks_held_by_a_stranger.run(scene) or ""


@attack("stranger")
def what_a_stranger_may_write(scene: Scene) -> str:
    """Nothing in the run directory is a stranger's to open for writing, to make, to rename or to remove."""
    return _may_write(scene)


@attack("user")
def what_a_user_may_write(scene: Scene) -> str:
    """Of the run directory a worker's user may connect to sockets, and change nothing."""
    return _may_write(scene)


def _may_write(scene: Scene) -> str:
    root = Path(scene.a.run_directory)
    for path in [root, *root.glob("**/*")]:
        if path.is_dir():
            with contextlib.suppress(OSError):
                os.mkdir(path / "mine")
                os.rmdir(path / "mine")
                return f"it may make files in {path.name}/"
        elif path.is_file():
            with contextlib.suppress(OSError):
                os.close(os.open(path, os.O_RDWR))
                return f"it may write {path.name}"
        for change in (
            lambda path=path: os.rename(path, f"{path}.old"),
            lambda path=path: os.chmod(path, 0o777),
        ):
            with contextlib.suppress(OSError):
                change()
                return f"it may rename or chmod {path.name}"
    return ""


@attack("worker", limit_s=40.0)
def a_child_that_holds_a_dead_workers_socket(scene: Scene) -> str:
    """A worker forks and dies; its child keeps the socket. The session, its movers and its memory must go."""
    memory = SealedMemory.create(1 << 20, "orphaned")
    inode = os.fstat(memory.fd).st_ino
    read, write = os.pipe()
    parent = os.fork()
    if parent == 0:
        session = WorkerByHand(scene.a.worker_socket)
        session.register("orphaned", memory)
        if os.fork() == 0:
            memory.close()
            os.write(write, b"x")
            time.sleep(60.0)
        os._exit(0)
    memory.close()
    os.waitpid(parent, 0)
    os.read(read, 1)
    until = time.monotonic() + 8.0
    while time.monotonic() < until:
        status = scene.send_request("status", node="a")
        if status is not None and not [e for e in status["engines"] if e["engine_id"] == "orphaned"]:
            break
        scene.rest(0.2)
    else:
        return "the dead worker's rank is still registered after 8 s"
    scene.rest(0.5)
    others = scene.send_request("mappers", inode=inode)
    return f"the dead worker's memory is mapped by {others}" if others else ""


@attack("stranger")
def shared_memory_squatted(scene: Scene) -> str:
    """A stranger makes the directories in /dev/shm whose names the next movers' parents will want."""
    made = []
    newest = int(Path("/proc/loadavg").read_text().split()[-1])
    for pid in range(newest, newest + 400):
        with contextlib.suppress(OSError):
            path = Path(f"/dev/shm/kvxferd-movers-{pid}")
            path.mkdir(mode=0o777)
            made.append(path)
    try:
        return newcomer(scene, "late-shm")
    finally:
        for path in made:
            with contextlib.suppress(OSError):
                path.rmdir()


@attack("operator")
def hang_up(scene: Scene) -> str:
    """SIGHUP reloads, or does nothing; it does not end the daemon."""
    for node in ("a", "b"):
        scene.send_request("signal", node=node, number=signal.SIGHUP)
    scene.rest(0.5)
    return ""


@attack("stranger")
def what_strangers_may_know(scene: Scene) -> str:
    """The processes of a daemon of another user: their memory, descriptors and environment are nobody's."""
    for pid in scene.send_request("pids", node="a"):
        for name in ("mem", "environ", "fd/0", "maps"):
            with contextlib.suppress(OSError):
                with open(f"/proc/{pid}/{name}", "rb") as file:
                    file.read(1)
                return f"/proc/{pid}/{name} can be read"
    return ""
