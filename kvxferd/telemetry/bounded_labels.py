"""Labels with names from outside, such as engines' and peers': few at a time, without odd characters."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

# 64 pairs and 64 peers are 910 series, up to 118 kB of a scrape.
MAX_NAMES = 64
# A name that nothing has used for this long gives its place to a newcomer. One in use keeps it: invented
# names neither take series of others nor make many.
IDLE_S = 600.0
OTHER = "other"
MAX_LABEL_CHARS = 64

_ODD = re.compile(r"[^A-Za-z0-9._:/\[\]-]")

Labels = tuple[str, ...]


def clean_label(text: str) -> str:
    """Return a name from outside as a label: short, of letters, digits and a few signs."""
    return _ODD.sub("_", text[:MAX_LABEL_CHARS]) or "_"


class BoundedLabels:
    """The names that have series now: `MAX_NAMES`, and `OTHER` for all that found no place.

    `begin` and `end` make and remove the series of some labels.
    """

    def __init__(
        self,
        begin: Callable[[Labels], None],
        end: Callable[[Labels], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._begin, self._end = begin, end
        self._clock = clock
        self.used_at: dict[Labels, float] = {}  # the longest unused first, without `OTHER`
        self._has_other = False

    def of(self, *names: str) -> Labels:
        """Return the labels under which these names count now."""
        now = self._clock()
        labels = tuple(map(clean_label, names))
        if self.used_at.pop(labels, None) is None:
            if len(self.used_at) >= MAX_NAMES:
                oldest = next(iter(self.used_at))
                if now - self.used_at[oldest] <= IDLE_S:
                    return self._others(len(names))
                del self.used_at[oldest]
                self._end(oldest)
            self._begin(labels)
        self.used_at[labels] = now
        return labels

    def _others(self, num_labels: int) -> Labels:
        labels = (OTHER,) * num_labels
        if not self._has_other:
            self._has_other = True
            self._begin(labels)
        return labels
