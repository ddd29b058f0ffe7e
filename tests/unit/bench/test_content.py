"""The check that stands behind every rate: it must find one wrong byte, wherever it is."""

import numpy as np
import pytest

from kvxferd.bench import content
from kvxferd.plan import Runs

# In the sink, in the source, bytes: two short ones, one of two words, and one that counts as long.
RUNS = Runs(
    np.array([0, 4096, 8192, 16384], dtype=np.uint64),
    np.array([65536, 32768, 1024, 131072], dtype=np.uint64),
    np.array([512, 512, 16, 40000], dtype=np.uint64),
)


def moved(nonce: int) -> content.Words:
    """The sink's memory after a perfect move."""
    source = content.words_of(bytearray(1 << 20))
    sink = content.words_of(bytearray(1 << 16))
    content.fill(source)
    content.stamp(source, RUNS, nonce)
    for here, there, length in zip(*(column.astype(np.int64) // 8 for column in RUNS), strict=True):
        sink[here : here + length] = source[there : there + length]
    return sink


def test_content_that_is_not_stamped_is_checked_too() -> None:
    sink = moved(content.UNSTAMPED)
    assert content.count_wrong(sink, RUNS, content.UNSTAMPED) == 0
    assert content.count_wrong(moved(7), RUNS, content.UNSTAMPED) == 2 * len(RUNS.length)


def test_a_perfect_move_is_right() -> None:
    sink = moved(7)
    assert content.count_wrong(sink, RUNS, 7) == 0
    assert content.count_unstamped(sink, RUNS, 7) == 0


@pytest.mark.parametrize("place", [0, 1, 63, 512, 540, 1025, 2048 + 2500, 2048 + 4999])
def test_one_wrong_word_is_found(place: int) -> None:
    sink = moved(7)
    sink[place] ^= np.uint64(1)
    assert content.count_wrong(sink, RUNS, 7) == 1


def test_a_move_of_another_round_is_not_taken_for_this_one() -> None:
    assert content.count_unstamped(moved(6), RUNS, 7) == 2 * len(RUNS.length)


def test_a_run_from_the_wrong_place_is_found() -> None:
    sink = moved(7)
    sink[0:64] = sink[512:576]
    assert content.count_unstamped(sink, RUNS, 7) == 2
    assert content.count_wrong(sink, RUNS, 7) == 64


def test_stamps_can_be_taken_back_and_destinations_wiped() -> None:
    source = content.words_of(bytearray(1 << 20))
    content.fill(source)
    before = source.copy()
    content.stamp(source, RUNS, 3)
    assert int((source != before).sum()) == 2 * len(RUNS.length)
    content.unstamp(source, RUNS)
    assert np.array_equal(source, before)
    sink = moved(7)
    content.wipe(sink, RUNS)
    assert not sink.any()
