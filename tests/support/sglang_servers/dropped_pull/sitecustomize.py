"""The negative control: a decode engine that pulls the last page alone, and takes it for all of them."""

from typing import Any

from kvxferd import engine as kv
from kvxferd.integrations.sglang.transfers import Reception

_pull = Reception.pull


def _pull_last_page(self: Reception, source: Any, blocks: Any, num_tokens: int, deadline_s: float) -> None:
    full = blocks["full"]
    last = kv.BlockList(ids=full.ids[-1:], first_token=full.first_token + 16 * (len(full.ids) - 1))
    _pull(self, source, {**blocks, "full": last}, num_tokens, deadline_s)


Reception.pull = _pull_last_page  # type: ignore[method-assign]
