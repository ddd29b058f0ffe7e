"""The picture: well-formed, and everybody is in it."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from kvxferd.cli.root import root

SVG = "{http://www.w3.org/2000/svg}"


def drawn(tmp_path: Path, prefill: str, decode: str) -> ElementTree.Element:
    """Return the picture's root element."""
    file = tmp_path / "picture.svg"
    result = CliRunner().invoke(root, ["explain", prefill, decode, "--svg", str(file)])
    assert result.exit_code == 0, result.output
    return ElementTree.fromstring(file.read_text("utf-8"))


def texts(picture: ElementTree.Element) -> list[str]:
    """Return everything written."""
    return [element.text or "" for element in picture.iter(f"{SVG}text")]


def titles(picture: ElementTree.Element) -> list[str]:
    """Return what is shown when pointed at."""
    return [element.text or "" for element in picture.iter(f"{SVG}title")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ("llama-3-70b,tp=8,pp=2", "llama-3-70b,tp=4,layout=NHD"),
        ("nemotron-h-8b,tp=16,pp=4", "nemotron-h-8b,tp=3"),
        ("deepseek-v3.2,tp=16", "deepseek-v3.2,tp=8,pp=8"),
        ("llama-3-70b,tp=32,pp=4", "llama-3-70b,tp=1"),  # more than 64
    ],
)
def test_every_pair_of_ranks_is_in_the_picture(tmp_path: Path, prefill: str, decode: str) -> None:
    """Read or not, each cell says which two ranks it is about; stages and layers are marked."""
    picture = drawn(tmp_path, prefill, decode)
    cells = {re.match(r"decode (pp\d+\.tp\d+) (?:does not read|reads) prefill (pp\d+\.tp\d+)", t)
             for t in titles(picture)} - {None}  # fmt: skip
    sizes = [int(n) for text in (decode, prefill) for n in (_key(text, "tp"), _key(text, "pp"))]
    pairs = {match.groups() for match in cells if match}
    assert len(pairs) == sizes[0] * sizes[1] * sizes[2] * sizes[3]
    written = " ".join(texts(picture))
    assert prefill in written
    assert decode in written
    assert "each decode rank reads" in written
    assert "not read" in written


def _key(text: str, key: str) -> str:
    found = re.search(rf",{key}=(\d+)", text)
    return found[1] if found else "1"


def test_everything_lies_inside_the_picture(tmp_path: Path) -> None:
    """Nothing is drawn beyond the edge."""
    picture = drawn(tmp_path, "llama-3-70b,tp=16,pp=4", "llama-3-70b,tp=8,pp=8")
    width, height = (float(picture.attrib[name]) for name in ("width", "height"))
    for rect in picture.iter(f"{SVG}rect"):
        if rect.attrib["width"] != "100%":
            x, y, w, h = (float(rect.attrib[name]) for name in ("x", "y", "width", "height"))
            assert x >= 0
            assert y >= 0
            assert x + w <= width
            assert y + h <= height


def test_a_refusal_is_no_picture(tmp_path: Path) -> None:
    """It is printed, and the exit code says so as well."""
    file = tmp_path / "picture.svg"
    result = CliRunner().invoke(root, ["explain", "llama-3-70b", "qwen3-8b", "--svg", str(file)])
    assert result.exit_code == 1
    assert not file.exists()


def test_names_cannot_break_the_picture(tmp_path: Path) -> None:
    """A file name with markup and a control character."""
    odd = tmp_path / "<a&b>\x1b.toml"
    odd.write_text('preset = "tiny-dense"\n')
    written = " ".join(texts(drawn(tmp_path, str(odd), "tiny-dense")))
    assert "<a&b>\N{REPLACEMENT CHARACTER}.toml" in written


def test_a_picture_that_cannot_be_written_is_refused() -> None:
    """One line, exit code 2."""
    result = CliRunner().invoke(root, ["explain", "tiny-dense", "tiny-dense", "--svg", "/nowhere/x.svg"])
    assert result.exit_code == 2
    assert "/nowhere/x.svg" in result.stderr
