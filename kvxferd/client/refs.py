"""References that a router makes before the prefill begins."""

from __future__ import annotations

import secrets

from kvxferd.client.arguments import check_name
from kvxferd.errors import Code, EngineError
from kvxferd.wire.common import TransferRef

MIN_NONCE_CHARS = 32


def make_ref(
    endpoint: str, engine_id: str, generation: str, transfer_id: str, nonce: str | None = None
) -> TransferRef:
    """Return the reference of a transfer to be published: for a router that asks both engines at once.

    The prefill engine publishes it with this `transfer_id` and `nonce`, and the decode engine pulls it with
    `progressive=True`. Whoever has the nonce may read the transfer, so it goes to these two engines alone.

    Args:
        endpoint, engine_id, generation: of the prefill engine; its daemon lists them (`GET /v1/engines`).
        transfer_id: 1 to 256 characters, used once in the engine's generation.
        nonce: 32 to 256 characters that nobody can guess; None: 32 random hex digits.

    Raises EngineError (`transfer-unknown`).
    """
    chosen = secrets.token_hex(16) if nonce is None else check_nonce(nonce)
    fields = {"endpoint": endpoint, "engine_id": engine_id, "generation": generation}
    return TransferRef.parse({**fields, "transfer_id": transfer_id, "nonce": chosen})


def check_nonce(nonce: str) -> str:
    """Return a nonce that is long enough not to be guessed. Raises EngineError."""
    checked = check_name(nonce, "a nonce", Code.BAD_REQUEST)
    if len(checked) < MIN_NONCE_CHARS:
        raise EngineError(
            f"cannot use a nonce of {len(checked)} characters: give {MIN_NONCE_CHARS} random ones at least, "
            "because whoever guesses it may read the transfer",
            Code.BAD_REQUEST,
        )
    return checked
