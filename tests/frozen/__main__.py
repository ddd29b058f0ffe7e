"""`.venv/bin/python -m tests.frozen [NAME...]`: record surfaces anew, all or those named."""

from __future__ import annotations

import sys

from tests.frozen import record
from tests.frozen.surfaces import SURFACES


def main(names: list[str]) -> int:
    """Return the exit code."""
    if unknown := sorted(set(names) - SURFACES.keys()):
        print(f"no such surface: {', '.join(unknown)}; there are {', '.join(SURFACES)}", file=sys.stderr)
        return 2
    names = names or list(SURFACES)
    for name in names:
        print(f"{name}: {'recorded' if record.write(name, SURFACES[name]()) else 'as it was'}")
    record.write_digests(names)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
