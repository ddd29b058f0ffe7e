"""Verbs of the command line against a served node."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import structlog.testing
from click.testing import CliRunner, Result

from kvxferd.cli.root import root
from kvxferd.config import Config
from tests.support.http_harness import config_in, serving
from tests.support.node_samples import StillNode


@asynccontextmanager
async def daemon(run_dir: Path, node: StillNode | None = None) -> AsyncIterator[Config]:
    """What the verbs know of a daemon: its control socket."""
    config = config_in(run_dir, bind="")
    with structlog.testing.capture_logs():  # its log is not the verb's output
        async with serving(config, node or StillNode()):
            yield config


async def run(*arguments: str, environ: Mapping[str, str] | None = None) -> Result:
    """Run a verb in a thread, while the server is served in this one."""
    return await asyncio.to_thread(CliRunner().invoke, root, list(arguments), env=environ or {})
