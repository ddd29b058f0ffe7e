"""Run directories and shared memory: what another user may do to them."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from tests.proofs.hostile.attack import Scene, attack


@attack("stranger", "user")
def what_may_be_written(scene: Scene) -> str:
    """Nothing in the run directory is theirs to open for writing, to make, to rename or to remove."""
    root = Path(scene.a.directory)
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
        return scene.newcomer()
    finally:
        for path in made:
            with contextlib.suppress(OSError):
                path.rmdir()
