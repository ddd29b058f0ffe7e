"""Strike one fault after another, and write what each output showed.

    python -m tests.proofs.game_day [--out DIRECTORY] [FAULT...]

Writes a file for each fault with the outputs of both nodes. Exits with 1 where the verdict did not name a
fault, or no output did. Which alerts fire: `make proofs ONLY=monitoring`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.proofs.game_day.faults import FAULTS, Fault
from tests.support.nodes.waiting import comes_true

LIMIT_S = 45.0
AFTER_S = 6.0  # after the sign, for the failures that follow it
PULLS_BEFORE = 20


@dataclass
class Result:
    """What was seen of a fault."""

    fault: Fault
    began_s: dict[tuple[str, str], float]  # by node and sign, after the strike
    outputs: dict[str, dict[str, str]]
    named_by: dict[str, bool] = field(default_factory=dict)

    @property
    def is_hidden(self) -> bool:
        """Whether the node's verdict lacks the fault's sign, or no output names the cause."""
        sign = self.fault.sign
        return bool(sign and (self.fault.node, sign) not in self.began_s) or not any(self.named_by.values())


def run(fault: Fault, directory: Path) -> Result:
    """Strike a fault, wait for its sign and AFTER_S more, and read the outputs of both nodes."""
    stage = fault.make(directory)
    try:
        if fault.strike is None:
            before: set[tuple[str, str]] = set()
            struck = stage.began
        else:
            stage.await_traffic(PULLS_BEFORE)
            before, struck = set(stage.seen), time.time()
            fault.strike(stage)
        comes_true(lambda: not fault.sign or (fault.node, fault.sign) in stage.seen, LIMIT_S)
        time.sleep(AFTER_S)
        began = {key: max(0.0, since - struck) for key, since in stage.seen.items() if key not in before}
        result = Result(fault, began, stage.outputs())
        texts = fault.names(stage)
        result.named_by = {
            name: any(text in shown for text in texts)
            for name, shown in result.outputs.get(fault.node, {}).items()
        }
        return result
    finally:
        stage.close()


def describe(result: Result) -> str:
    """Return a fault's line: what its verdict had, after how many seconds, and what names the cause."""
    began = ", ".join(
        f"{what} {seconds:.1f} s" + ("" if node == result.fault.node else f" ({node})")
        for (node, what), seconds in sorted(result.began_s.items(), key=lambda item: item[1])
    )
    named = ", ".join(name for name, is_named in result.named_by.items() if is_named)
    return f"{result.fault.title}, {result.fault.node}: {began or 'no verdict'}; named by {named or 'none'}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the named faults, or all. Return the exit status."""
    parser = argparse.ArgumentParser(prog="game_day", description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("build/game-day"), help="for the files")
    names = [fault.name for fault in FAULTS]
    parser.add_argument("faults", nargs="*", metavar="FAULT", help=f"of {', '.join(names)}; all by default")
    chosen = parser.parse_args(arguments)
    unknown = [name for name in chosen.faults if name not in names]
    if unknown:
        parser.error(f"no such fault: {', '.join(unknown)}; there are {', '.join(names)}")
    chosen.out.mkdir(parents=True, exist_ok=True)
    hidden = []
    for fault in FAULTS:
        if chosen.faults and fault.name not in chosen.faults:
            continue
        with tempfile.TemporaryDirectory(prefix="game-day-") as directory:
            result = run(fault, Path(directory))
        texts = [
            f"## {node}: {name}\n\n{text}"
            for node, outputs in result.outputs.items()
            for name, text in outputs.items()
        ]
        (chosen.out / f"{fault.name}.md").write_text("\n\n".join([f"# {fault.title}", *texts]))
        print(describe(result), flush=True)
        if result.is_hidden:
            hidden.append(fault.name)
    if hidden:
        print(f"not named: {', '.join(hidden)}")
    return 1 if hidden else 0


if __name__ == "__main__":
    sys.exit(main())
