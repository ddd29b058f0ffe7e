"""Error codes: each with the HTTP status and the exit code that it becomes, and the errors that have it."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

from kvxferd import errors
from kvxferd.errors import Code, KvxferdError
from tests.frozen.serving import run_verb, serving
from tests.support.node_samples import StillNode


class Refusing(StillNode):
    """A node that refuses to drop any peer, with the code that the endpoint names."""

    def drop_peer(self, endpoint: str) -> list[Any]:
        """Raise it."""
        raise KvxferdError("cannot drop it", Code(endpoint))


def surface() -> dict[str, Any]:
    """Return codes and errors."""
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    return {
        "codes": asyncio.run(_codes()),
        "errors": {
            kind.__name__: {"code": str(kind.default_code), "base": kind.__base__.__name__}
            for kind in kinds
            if issubclass(kind, KvxferdError)
        },
    }


async def _codes() -> dict[str, Any]:
    found = {}
    with tempfile.TemporaryDirectory() as directory:
        async with serving(Path(directory), Refusing()) as served, served.over_unix() as client:
            for code in Code:
                async with client.post("/v1/peers/drop", json={"endpoint": str(code)}) as answer:
                    status = answer.status
                verb = await run_verb("drop-peer", str(code), "--socket", served.socket)
                assert f"[{code}]" in verb.output
                found[str(code)] = {"http": status, "exit": verb.exit_code}
    return found
