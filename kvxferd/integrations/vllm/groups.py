"""vLLM's cache groups and block lists in our words.

Scheduler and workers of an engine name a group alike, from its position and kind, and both turn the
block lists that vLLM has for a request into block lists of a transfer. A vLLM list has a place for
every block of tokens from the first on; places whose block was given back, or never was, hold the
null block, id 0.
"""

from __future__ import annotations

import array
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from kvxferd.client import BlockList
from kvxferd.errors import Code, EngineError
from kvxferd.ids import GroupName
from kvxferd.integrations.vllm.facts import CacheGroup, CacheKind
from kvxferd.integrations.vllm.vllm_specs import read_groups

NULL_BLOCK = 0


def group_name(index: int, group: CacheGroup) -> str:
    """Return a group's name: its place among the KVCacheConfig's groups, and its kind."""
    return f"{index}.{group.kind.value}"


@dataclasses.dataclass(frozen=True)
class CacheGroups:
    """The groups of an engine's cache that take part in transfers."""

    groups: tuple[CacheGroup, ...]
    num_listed: int  # block lists that vLLM has for a request, those that take no part included
    lookahead_tokens: int = (
        0  # last tokens of a prompt that a draft of several modules must not see prefilled
    )

    @classmethod
    def from_vllm(cls, vllm_config: Any, kv_cache_config: Any) -> CacheGroups:
        """Read them, on either side. Raises LayoutError for a kind of group that is not known here."""
        return cls(
            read_groups(kv_cache_config, vllm_config),
            len(kv_cache_config.kv_cache_groups),
            max(0, getattr(vllm_config, "num_prefill_lookahead_tokens", 0) - 1),
        )

    @property
    def names(self) -> tuple[GroupName, ...]:
        """Their names, in order."""
        return tuple(GroupName(group_name(group.index, group)) for group in self.groups)

    @property
    def has_state(self) -> bool:
        """Whether a request has a running state, which stands at one token alone."""
        return any(group.kind is CacheKind.STATE for group in self.groups)

    @property
    def has_window(self) -> bool:
        """Whether some layers give back blocks before their window."""
        return any(group.kind is CacheKind.SLIDING for group in self.groups)

    @property
    def can_report_failed_blocks(self) -> bool:
        """Whether vLLM may be told of a failed load by its block ids, and keep the blocks before them.

        An id names a block only where there is one group, and the blocks before it hold the tokens
        before only if all of them are kept: not those of a state, nor of a sliding window, whose places
        hold the null block.
        """
        return self.num_listed == 1 and all(group.kind is CacheKind.FULL for group in self.groups)

    @property
    def num_tokens_left_to_decode(self) -> int:
        """How many of a prompt's last tokens the prefill engine must leave to the decode engine.

        A decode engine computes at least the last token by itself, and a state cannot go back by one: so it
        must stand before that token. Nor can a window: given all tokens, vLLM keeps no block that
        only the last token looks at, and then computes that token. A draft of several modules needs its
        whole lookahead left.
        """
        return max(1 if self.has_state or self.has_window else 0, self.lookahead_tokens)

    def prefill_tokens(self, num_prompt_tokens: int) -> int:
        """Return how many tokens of a prompt are computed, published and pulled; the rest is decode's."""
        left = self.num_tokens_left_to_decode
        return num_prompt_tokens - left if num_prompt_tokens > left else num_prompt_tokens

    def select_blocks(
        self, block_ids: Sequence[Sequence[int]], num_tokens: int, num_computed_tokens: int = 0
    ) -> dict[str, BlockList]:
        """Return the lists to publish, or to pull into, of a request with `num_tokens` tokens.

        `block_ids` are all of vLLM's lists for the request, one for each group of the KVCacheConfig. A sink
        that has the first `num_computed_tokens` already leaves out the blocks that hold nothing
        else; one that has all `num_tokens` gets empty lists. Raises EngineError (blocks-invalid),
        naming the group, where a list has no block for a token that is needed.
        """
        if len(block_ids) != self.num_listed:
            raise _blocks_invalid(
                f"cannot use {len(block_ids)} block lists: the engine has {self.num_listed} groups"
            )
        return {
            name: BlockList(ids=array.array("i"))
            if num_computed_tokens >= num_tokens
            else _select_group_blocks(name, group, block_ids[group.index], num_tokens, num_computed_tokens)
            for name, group in zip(self.names, self.groups, strict=True)
        }

    def block_ids(self, lists: Mapping[str, BlockList]) -> set[int]:
        """Return every block id in some lists: what vLLM is told of a failed load."""
        return {int(block) for listed in lists.values() for block in listed.ids}  # type: ignore[union-attr]


def _select_group_blocks(
    name: str, group: CacheGroup, ids: Sequence[int], num_tokens: int, num_computed_tokens: int
) -> BlockList:
    """Return one group's list."""
    if group.kind is CacheKind.STATE:
        block = _state_block(name, group, ids, num_tokens)
        return BlockList(ids=array.array("i", [block]), state_at=num_tokens)
    per_id = group.block_tokens * group.shard_count
    end = -(-num_tokens // per_id)
    if len(ids) < end:
        raise _blocks_invalid(
            f"cannot use the {len(ids)} blocks of group {name!r}: {num_tokens} tokens at {per_id} a block "
            f"take {end}"
        )
    start = num_computed_tokens // per_id
    if group.kept_tokens is not None:
        start = max(start, (num_tokens - group.kept_tokens) // per_id)
    needed = array.array("i", ids[start:end])
    if NULL_BLOCK in needed:
        token = (start + needed.index(NULL_BLOCK)) * per_id
        raise _blocks_invalid(f"cannot use the blocks of group {name!r}: there is none for token {token}")
    return BlockList(ids=needed, first_token=start * per_id)


def _state_block(name: str, group: CacheGroup, ids: Sequence[int], num_tokens: int) -> int:
    """Return the block in which a request's state at `num_tokens` stands.

    Where a list has a place for every block of tokens, the state is at the place of the last token;
    else in the first. Behind it are only scratch slots of speculation.
    """
    place = -(-num_tokens // group.block_tokens) - 1 if group.state_by_position else 0
    behind = len(ids) - 1 - place
    if behind < 0 or ids[place] == NULL_BLOCK:
        raise _blocks_invalid(
            f"cannot use the state of group {name!r}: there is no block for it at token {num_tokens}"
        )
    if behind > group.speculative_blocks:
        raise _blocks_invalid(
            f"cannot use the state of group {name!r}: {behind} blocks follow the one of token {num_tokens}, "
            f"and {group.speculative_blocks} are scratch: it has moved on"
        )
    return ids[place]


def _blocks_invalid(message: str) -> EngineError:
    return EngineError(message, Code.BLOCKS_INVALID)
