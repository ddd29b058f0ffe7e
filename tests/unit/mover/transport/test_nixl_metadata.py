"""What describes memory of several types at once."""

from __future__ import annotations

import msgspec
import pytest

from kvxferd.mover.transport.nixl import join_metadata, split_metadata


@pytest.mark.parametrize("parts", [[b"one"], [b"one", b""], [b"nixl", b"two", bytes(1000)]])
def test_what_is_joined_is_split(parts: list[bytes]) -> None:
    assert split_metadata(join_metadata(parts)) == parts


def test_one_part_is_the_librarys_own() -> None:
    assert join_metadata([b"nixl..."]) == b"nixl..."


def test_nonsense_is_an_error() -> None:
    joined = join_metadata([b"a", b"b"])
    with pytest.raises(msgspec.DecodeError):
        split_metadata(joined[:-1])
