"""An image that stands in podman's storage: localhost/kvxferd:cpu, or the one that KVXFERD_IMAGE names."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.containers import DaemonContainer, inspect

IMAGE = os.environ.get("KVXFERD_IMAGE", "localhost/kvxferd:cpu")
HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.timeout(600))


@pytest.fixture(scope="session")
def image() -> str:
    return IMAGE


@pytest.fixture
def start(image: str, tmp_path: Path) -> Iterator[Callable[..., DaemonContainer]]:
    """Start a daemon of that name in a container, ready; it is gone at the end."""
    uid = int(inspect(image)["User"].split(":")[0])
    # pytest's own directories are for this user alone, and the container's is another.
    for folder in [tmp_path, *tmp_path.parents]:
        if folder.name.startswith(("pytest-", tmp_path.name)):
            folder.chmod(folder.stat().st_mode | 0o011)
    daemons: list[DaemonContainer] = []

    def one(name: str, http_port: int = 0, *, on_host: bool = False) -> DaemonContainer:
        daemon = DaemonContainer(image, tmp_path / name, uid, http_port, on_host=on_host)
        daemons.append(daemon)
        daemon.wait_ready()
        return daemon

    try:
        yield one
    finally:
        for daemon in daemons:
            daemon.remove()
