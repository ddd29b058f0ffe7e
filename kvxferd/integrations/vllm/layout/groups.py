"""Groups and block lists of a transfer, from vLLM's cache groups and block lists.

The scheduler and the workers of an engine give a group the same name, from its position and kind, and
both make a transfer's block lists from vLLM's lists for the request. A vLLM list has an entry for every
block of tokens from the first on. An entry whose block was freed, or never allocated, holds the null
block, id 0.
"""

from __future__ import annotations

import array
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from kvxferd.client import BlockList
from kvxferd.errors import Code, EngineError
from kvxferd.ids import GroupName
from kvxferd.integrations.vllm.layout.facts import CacheGroup, CacheKind
from kvxferd.integrations.vllm.layout.specs import read_groups

NULL_BLOCK = 0


def group_name(index: int, group: CacheGroup) -> str:
    """Return a group's name: its index among the KVCacheConfig's groups, and its kind."""
    return f"{index}.{group.kind.value}"


@dataclasses.dataclass(frozen=True)
class CacheGroups:
    """The groups of an engine's cache that take part in transfers."""

    groups: tuple[CacheGroup, ...]
    num_listed: int  # block lists that vLLM has for a request, with those that take no part
    lookahead_tokens: int = (
        0  # last tokens of a prompt that a draft of several modules must not see prefilled
    )

    @classmethod
    def from_vllm(cls, vllm_config: Any, kv_cache_config: Any) -> CacheGroups:
        """Return the groups, in the scheduler or in a worker. Raises LayoutError for an unsupported kind."""
        return cls(
            read_groups(kv_cache_config, vllm_config),
            len(kv_cache_config.kv_cache_groups),
            max(0, getattr(vllm_config, "num_prefill_lookahead_tokens", 0) - 1),
        )

    @property
    def names(self) -> tuple[GroupName, ...]:
        """Return the groups' names, in order."""
        return tuple(GroupName(group_name(group.index, group)) for group in self.groups)

    @property
    def has_state(self) -> bool:
        """Whether a request has a running state, which is valid at one token only."""
        return any(group.kind is CacheKind.STATE for group in self.groups)

    @property
    def has_window(self) -> bool:
        """Whether some layers free the blocks before their window."""
        return any(group.kind is CacheKind.SLIDING for group in self.groups)

    @property
    def can_be_read_early(self) -> bool:
        """Whether a reader gains by beginning before the prompt is computed.

        States and windows are read at the end alone. A draft of several modules writes the end of a chunk
        again.
        """
        return not self.lookahead_tokens and all(group.kind is CacheKind.FULL for group in self.groups)

    @property
    def num_tokens_left_to_decode(self) -> int:
        """Return how many of a prompt's last tokens the prefill engine leaves to the decode engine.

        A decode engine computes at least the last token by itself. A state cannot go back by one token, so
        it must be the one before that token. Nor can a window: given all tokens, vLLM keeps no block that
        only the last token reads, and then computes that token. A draft of several modules needs its
        whole lookahead left.
        """
        return max(1 if self.has_state or self.has_window else 0, self.lookahead_tokens)

    def prefill_tokens(self, num_prompt_tokens: int) -> int:
        """Return how many tokens of a prompt are published and pulled. Decode computes the rest."""
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

    def whole_blocks_tokens(self, num_tokens: int) -> int:
        """Return how many of the first `num_tokens` are in blocks that they fill, in every group."""
        return num_tokens - num_tokens % math.lcm(*map(_tokens_per_id, self.groups))

    def num_blocks(self, num_tokens: int) -> int:
        """Return how many blocks hold so many tokens, in all groups together."""
        return sum(
            1
            if group.kind is CacheKind.STATE and not group.state_by_position
            else -(-num_tokens // _tokens_per_id(group))
            for group in self.groups
        )


def _tokens_per_id(group: CacheGroup) -> int:
    return group.block_tokens * group.shard_count


def _select_group_blocks(
    name: str, group: CacheGroup, ids: Sequence[int], num_tokens: int, num_computed_tokens: int
) -> BlockList:
    """Return one group's list."""
    if group.kind is CacheKind.STATE:
        block = _state_block(name, group, ids, num_tokens)
        return BlockList(ids=array.array("i", [block]), state_at=num_tokens)
    per_id = _tokens_per_id(group)
    end = -(-num_tokens // per_id)
    if len(ids) < end:
        raise _blocks_invalid(
            f"cannot use the {len(ids)} blocks of group {name!r}: {num_tokens} tokens at {per_id} a block "
            f"take {end}"
        )
    start = 0 if group.is_never_cached else num_computed_tokens // per_id
    if group.kept_tokens is not None:
        start = max(start, (num_tokens - group.kept_tokens) // per_id)
    needed = array.array("i", ids[start:end])
    if NULL_BLOCK in needed:
        token = (start + needed.index(NULL_BLOCK)) * per_id
        raise _blocks_invalid(f"cannot use the blocks of group {name!r}: there is none for token {token}")
    return BlockList(ids=needed, first_token=start * per_id)


def _state_block(name: str, group: CacheGroup, ids: Sequence[int], num_tokens: int) -> int:
    """Return the block that holds a request's state at `num_tokens`.

    Where a list has an entry for every block of tokens, the state is in the last token's; else it is in
    the first. Only scratch slots of speculation are behind it.
    """
    index = -(-num_tokens // group.block_tokens) - 1 if group.state_by_position else 0
    behind = len(ids) - 1 - index
    if behind < 0 or ids[index] == NULL_BLOCK:
        raise _blocks_invalid(
            f"cannot use the state of group {name!r}: there is no block for it at token {num_tokens}"
        )
    if behind > group.speculative_blocks:
        raise _blocks_invalid(
            f"cannot use the state of group {name!r}: {behind} blocks follow the one of token {num_tokens}, "
            f"and {group.speculative_blocks} are scratch: it has moved on"
        )
    return ids[index]


def _blocks_invalid(message: str) -> EngineError:
    return EngineError(message, Code.BLOCKS_INVALID)
