"""Each branch of a module is counted by a name that stays, and a place that is no longer met is named."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.simulation import rare_states
from tests.simulation.branches import count_branches

SAMPLE = '''
"""A sample."""
class Stock:
    """A stock."""

    def take(self, wanted, left):
        """Take."""
        if not wanted:
            return Code.EMPTY
        elif wanted == Code.ALL:
            wanted = left
        else:
            wanted += 0
        for one in range(wanted):
            if one > left:
                break
        else:
            left = -1 if left else 0
        for one in ():
            continue
        try:
            return 1 // left
        except ZeroDivisionError as error:
            raise StockError("none", Code.BUSY) from error
'''

PLACES = """
Stock.take: if not wanted -> Code.EMPTY
Stock.take: if wanted == Code.ALL
Stock.take: else of if wanted == Code.ALL
Stock.take: past if not wanted
Stock.take: for one in range(wanted)
Stock.take: if one > left
Stock.take: else of for one in range(wanted)
Stock.take: value if left
Stock.take: value else of if left
Stock.take: for one in ()
Stock.take: except ZeroDivisionError as error -> Code.BUSY, raise StockError
"""


def test_places_are_named_by_function_and_branch() -> None:
    _, names = count_branches(SAMPLE, "room/sample.py")
    assert names == [f"room/sample.py {line}" for line in PLACES.split("\n")[1:-1]]


def test_a_counted_function_does_what_it_did() -> None:
    source = SAMPLE.replace("Code.", "Code_")
    tree, names = count_branches(source, "sample.py", 2)
    met = [0] * (2 + len(names))

    def value(number: int, of: object) -> object:
        met[number] += 1
        return of

    counted = {"_met_": met, "_value_": value, "Code_EMPTY": "empty", "Code_ALL": "all", "Code_BUSY": "busy"}
    exec(compile(ast.fix_missing_locations(tree), "sample.py", "exec"), counted)
    take = counted["Stock"]().take
    assert (take(0, 9), take("all", 3), take(5, 3)) == ("empty", -1, 0)
    with pytest.raises(NameError, match="StockError") as raised:
        take(5, 0)
    assert source.splitlines()[raised.traceback[-1].lineno].strip().startswith("raise StockError")
    assert (counted["__doc__"].strip(), take.__doc__) == ("A sample.", "Take.")
    assert met == [0, 0, 1, 1, 2, 3, 10, 2, 1, 1, 0, 0, 1]


def test_a_place_that_was_met_often_has_to_be_met(tmp_path: Path) -> None:
    record = tmp_path / "met.tsv"
    rare_states.write({"kept": 40, "lost": 30, "gone": 99, "rare": 29}, record)
    assert record.read_text() == "gone\t99\nkept\t40\nlost\t30\n"
    found = rare_states.compare(
        rare_states.read(record), {"kept": 1, "new": 5}, ["kept", "lost", "rare", "new"]
    )
    assert found == [
        "not met, and 30 times in the record: lost",
        "gone from the source, so write the record anew: gone",
    ]
