"""The nodes' keys, and whom each admits: files that its daemon reads."""

from __future__ import annotations

import hashlib
from pathlib import Path

from kvxferd.control.curve_keys import SECRET_MODE
from tests.simulation.kernel import Kernel
from tests.simulation.libzmq import public_of

# A daemon has read a changed file by then: two looks, and the time of its threads. Then it acts at once.
READ_S, AT_ONCE_S = 1.2, 0.2


class Keys:
    """One key for each node, the same in every episode. At first all admit all."""

    def __init__(self, directory: Path, nodes: list[str], kernel: Kernel) -> None:
        self._directory, self._kernel = directory, kernel
        self.public: dict[str, str] = {}
        self.turned_away: dict[str, str] = {}  # by node: whom it does not admit
        self.changed_at: dict[str, float] = {}  # by node: when its file was last written
        directory.mkdir()
        for node in nodes:
            secret = hashlib.sha256(node.encode()).digest()
            self.public[node] = public_of(secret).hex()
            file = self.secret_file(node)
            file.write_text(secret.hex())
            file.chmod(SECRET_MODE)
        for node in nodes:
            self.admit_all(node)

    def secret_file(self, node: str) -> Path:
        """Return the file of a node's own key."""
        return self._directory / f"{node}.secret"

    def allowed_file(self, node: str) -> Path:
        """Return the file of the keys that a node admits."""
        return self._directory / f"{node}.allowed"

    def admit_all(self, node: str) -> None:
        """Have a node admit all others."""
        self.turned_away.pop(node, None)
        self._write(node, [*self.public.values()])

    def turn_away(self, node: str, other: str) -> None:
        """Have a node admit all but that one."""
        self.turned_away[node] = other
        self._write(node, [key for name, key in self.public.items() if name != other])

    def spoil(self, node: str) -> None:
        """Have a node's file say nothing: it goes on with what it has read."""
        self._write(node, ["no key"])

    def _write(self, node: str, lines: list[str]) -> None:
        made = self._directory / "new"
        made.write_text("".join(f"{line}\n" for line in lines))
        made.rename(self.allowed_file(node))
        self.changed_at[node] = self._kernel.now
