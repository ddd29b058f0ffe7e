"""Where no transfer library can be imported, the reason tells the daemon's operator what to install."""

from __future__ import annotations

import sys

import pytest

from kvxferd.errors import Code, MoverError
from kvxferd.mover.backends import DEFAULT_BACKEND
from kvxferd.mover.process.forkserver import _load_library
from kvxferd.mover.transport.nixl import LIBRARIES


@pytest.mark.parametrize(
    ("use", "names", "advice"),
    [
        ("auto", ["nixl", "rixl"], "run: pip install 'kvxferd[daemon,nixl]'"),
        ("nixl", ["nixl"], "run: pip install 'kvxferd[daemon,nixl]'"),
        ("rixl", ["rixl"], "install it, or set mover.library to auto"),
    ],
)
def test_a_missing_library_is_named_with_what_to_install(
    use: str, names: list[str], advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in LIBRARIES:
        for module in (name, f"{name}._api"):
            monkeypatch.setitem(sys.modules, module, None)  # an import of it fails
    with pytest.raises(MoverError) as refused:
        _load_library(use, DEFAULT_BACKEND)
    assert refused.value.code is Code.NIXL_UNAVAILABLE
    for name in LIBRARIES:
        assert (f"{name}: " in refused.value.message) == (name in names)
    assert f"; in the daemon's environment {advice}, and start the daemon again" in refused.value.message
