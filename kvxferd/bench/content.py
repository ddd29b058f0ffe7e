"""The content of the memory, by which every implementation is checked for the bytes that it moved.

The source holds one word for each 8 bytes, computed from its offset. Before each timed round the
first and the last word of every run are stamped anew; after it the sink must hold those stamps.
Once per case and implementation the destination is wiped first, and every byte of it is compared.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from kvxferd.plan import Runs

Words = npt.NDArray[np.uint64]

WORD = 8
# The stamp that equals the content itself.
UNSTAMPED = (1 << 64) - 1
_STEP = np.uint64(0x9E3779B97F4A7C15)
_CHUNK = 1 << 20  # words processed at a time
_SHORT_RUN = 4096  # words; shorter runs are compared many at a time


def words_of(buffer: memoryview | bytearray) -> Words:
    """Return a writable view of a region as words; a last, partial word is left out."""
    whole = len(buffer) // WORD * WORD
    return np.frombuffer(memoryview(buffer)[:whole], dtype=np.uint64)


def fill(words: Words) -> None:
    """Write the source's content."""
    for start in range(0, len(words), _CHUNK):
        stop = min(start + _CHUNK, len(words))
        words[start:stop] = _content(np.arange(start, stop, dtype=np.uint64))


def stamp(words: Words, runs: Runs, nonce: int) -> None:
    """Stamp the ends of every run in the source."""
    for places in _end_words(runs.remote, runs.length):
        words[places] = _stamps(places, nonce)


def unstamp(words: Words, runs: Runs) -> None:
    """Restore the content where the ends of runs were stamped."""
    for places in _end_words(runs.remote, runs.length):
        words[places] = _content(places.astype(np.uint64))


def wipe(words: Words, runs: Runs) -> None:
    """Write zeros over every run's destination."""
    for start, length in zip(_in_words(runs.local), _in_words(runs.length), strict=True):
        words[start : start + length] = 0


def count_unstamped(words: Words, runs: Runs, nonce: int) -> int:
    """Return how many ends of runs in the sink do not hold the stamps of their source."""
    pairs = zip(_end_words(runs.local, runs.length), _end_words(runs.remote, runs.length), strict=True)
    return sum(int((words[here] != _stamps(there, nonce)).sum()) for here, there in pairs)


def count_wrong(words: Words, runs: Runs, nonce: int) -> int:
    """Return how many words of the sink differ from the source's, the ends of runs as stamped included."""
    wrong = count_unstamped(words, runs, nonce)
    for here, there in _interior_words(runs):
        wrong += int((words[here] != _content(there.astype(np.uint64))).sum())
    return wrong


def _content(places: npt.NDArray[np.uint64]) -> Words:
    return (places + np.uint64(1)) * _STEP


def _stamps(places: npt.NDArray[np.int64], nonce: int) -> Words:
    return ~_content(places.astype(np.uint64)) ^ np.uint64(nonce)


def _in_words(offsets: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    return offsets.astype(np.int64) // WORD


def _end_words(
    offsets: npt.NDArray[np.uint64], length: npt.NDArray[np.uint64]
) -> tuple[npt.NDArray[np.int64], ...]:
    first = _in_words(offsets)
    return first, first + _in_words(length) - 1


def _interior_words(runs: Runs) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
    """Yield indices, in the sink and in the source, of all words but the ends of runs."""
    local, remote, length = (_in_words(column) for column in runs)
    for size in np.unique(length):
        if size <= 2:
            continue
        alike = np.flatnonzero(length == size)
        step = max(1, _CHUNK // int(size)) if size <= _SHORT_RUN else 1
        for first in range(0, len(alike), step):
            some = alike[first : first + step]
            for begin in range(1, int(size) - 1, _CHUNK):
                inside = np.arange(begin, min(begin + _CHUNK, int(size) - 1), dtype=np.int64)
                yield (local[some][:, None] + inside).ravel(), (remote[some][:, None] + inside).ravel()
