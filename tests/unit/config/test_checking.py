"""Every problem of a file at once, each at its line."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxferd.config import SETTINGS, load_config
from kvxferd.config.checking import MAX_LINES_TO_LOCATE, find_problems
from kvxferd.config.sample import sample_text
from kvxferd.errors import ConfigError

REPOSITORY_SAMPLE = Path(__file__).parents[3] / "config" / "kvxferd.toml"


def located(tmp_path: Path, text: str) -> list[tuple[str, int]]:
    file = tmp_path / "k.toml"
    file.write_text(text)
    return [(problem.key, problem.line) for problem in find_problems(file)]


def test_the_sample_is_one_file_and_has_no_problem(tmp_path: Path) -> None:
    assert REPOSITORY_SAMPLE.is_symlink(), "a second copy could drift"
    assert REPOSITORY_SAMPLE.read_text() == sample_text()
    assert located(tmp_path, sample_text()) == []


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("", []),
        ("# nothing\n[transfer]\nlease = 3\n", [("transfer.lease", 3)]),
        ("[transfer]\n\n# a comment\nlease = 3 # and why\nlease_s = 3\n", [("transfer.lease", 4)]),
        ("transfer = { lease_s = 4,  max_hold = 3 }", [("transfer.max_hold", 1)]),
        ("transfer.lease = 3\ntransfer.lease_s = 'x'", [("transfer.lease", 1), ("transfer.lease_s", 2)]),
        ("[no]\na = 1\n[log]\nlevel = 'loud'\n[nor]\n", [("no", 1), ("log.level", 4), ("nor", 5)]),
        (
            "[worker]\nallowed_uids = [\n 0,\n 'root',\n]\nmode = 660",
            [("worker.allowed_uids", 2), ("worker.mode", 6)],
        ),
        # A key's name in a text of several lines is not the key.
        (
            "[mover.environment]\nA = '''\nread = 1\n'''\n[mover.x]\n[log]\nform = 1",
            [("mover.x", 5), ("log.form", 7)],
        ),
        ("[transfer]\r\nlease = 3\r\n", [("transfer.lease", 2)]),
        ("[mover]\nread = 'a\u2028b'\npool_size = -1", [("mover.read", 2), ("mover.pool_size", 3)]),
        ("[log]\nlevel = 'info'\nlevel = 'info'\n", [("", 3)]),  # not TOML
        # Contradictions are looked for once every value is valid by itself.
        ("[log]\nlevel = 'info'\n[transfer]\nlease_s = 900", [("transfer.lease_s", 4)]),
        ("[peer]\nbind = 'tcp://0.0.0.0:1'", [("peer.bind", 2)]),
    ],
)
def test_each_bad_key_is_found_at_its_line(tmp_path: Path, text: str, want: list[tuple[str, int]]) -> None:
    assert located(tmp_path, text) == want


def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        find_problems(tmp_path / "none.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="not TOML"):
        find_problems(tmp_path / "bytes.toml")


def test_lines_of_a_long_file_are_not_looked_for(tmp_path: Path) -> None:
    assert located(tmp_path, "[no]\n" + "\n" * MAX_LINES_TO_LOCATE) == [("no", 0)]


def test_a_secret_in_place_of_its_path_is_not_repeated(tmp_path: Path) -> None:
    file = tmp_path / "k.toml"
    file.write_text(
        "[peer]\ncurve_secret_key_file = 'c0ffee'\n[mover]\nenvironment = {PASSWORD = ['hunter2']}"
    )
    messages = "".join(problem.message for problem in find_problems(file))
    assert "peer.curve_secret_key_file" in messages
    assert "mover.environment" in messages
    assert "c0ffee" not in messages
    assert "hunter2" not in messages


VALUES = st.sampled_from(['"x"', "-1", "3", "true", "[]", "{}", '"/x"', "1.5", '"info"'])
KEYS = st.sampled_from([*SETTINGS, "log.nothing", "nothing.level"])


@given(st.dictionaries(KEYS, VALUES, max_size=6))
def test_a_file_has_problems_if_and_only_if_the_daemon_refuses_it(
    tmp_path_factory: Any, values: dict[str, str]
) -> None:
    file = tmp_path_factory.getbasetemp() / "generated.toml"
    file.write_text("".join(f"{key} = {value}\n" for key, value in values.items()))
    lines = {key: number for number, key in enumerate(values, 1)}
    problems = find_problems(file)
    messages = [problem.message for problem in problems]
    if problems:
        with pytest.raises(ConfigError) as refused:
            load_config(file, {}, {})
        # In the order of the file's tables, which is not always that of the lines.
        reasons = refused.value.message.splitlines()
        assert sorted(line.strip() for line in reasons[len(reasons) > 1 :]) == sorted(messages)
    else:
        load_config(file, {}, {})
    for problem in problems:
        assert problem.line == lines.get(problem.key, problem.line)
