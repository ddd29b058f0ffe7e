"""Strike one fault after another, and write what each output showed.

    python -m tests.proofs.game_day [--out DIRECTORY] [FAULT...]

Writes a file for each fault with the outputs of both nodes, and `table.md`. Exits with 1 where the verdict
did not name a fault, or no output did. Which alerts fire: `make proofs ONLY=monitoring`.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
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


def write(result: Result, directory: Path) -> None:
    """Write every output of a fault into a file."""
    parts = [f"# {result.fault.title}\n"]
    for node, outputs in result.outputs.items():
        parts += [f"## {node}: {name}\n\n```text\n{text.rstrip()}\n```\n" for name, text in outputs.items()]
    (directory / f"{result.fault.name}.md").write_text("\n".join(parts))


def table(results: Sequence[Result]) -> str:
    """Return the results as a Markdown table."""
    heads = ["fault", "read at", "in the verdict, seconds after the strike", "cause named by"]
    rows = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for result in results:
        began = _in_order(result.began_s, result.fault.node) or "none"
        cells = [result.fault.title, result.fault.node, began, _named_by(result)]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def _in_order(seconds_by_key: dict[tuple[str, str], float], own: str) -> str:
    """Return what began, in order, with the node where that is not the one that is read."""
    return ", ".join(
        f"{what} {seconds:.1f}" + ("" if node == own else f" ({node})")
        for (node, what), seconds in sorted(seconds_by_key.items(), key=lambda item: item[1])
    )


def _named_by(result: Result) -> str:
    silent = [name.partition(" ")[0] for name, is_named in result.named_by.items() if not is_named]
    if len(silent) == len(result.named_by):
        return "none"
    return f"all but {', '.join(silent)}" if silent else "all"


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
    results = []
    for fault in FAULTS:
        if chosen.faults and fault.name not in chosen.faults:
            continue
        with tempfile.TemporaryDirectory(prefix="game-day-") as directory:
            result = run(fault, Path(directory))
        results.append(result)
        write(result, chosen.out)
        print(table([result]).splitlines()[-1], flush=True)
    command = shlex.join(["python", "-m", "tests.proofs.game_day", *chosen.faults])
    text = f"`{command}`, {datetime.now(UTC):%Y-%m-%d}\n\n{table(results)}"
    (chosen.out / "table.md").write_text(text)
    hidden = [result.fault.name for result in results if result.is_hidden]
    if hidden:
        print(f"not named: {', '.join(hidden)}")
    return 1 if hidden else 0


if __name__ == "__main__":
    sys.exit(main())
