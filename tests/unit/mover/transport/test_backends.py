"""The library and the backend that movers use: how they are refused, and that an agent has one alone."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxferd.errors import Code, MoverError
from kvxferd.ids import AgentName
from kvxferd.mover.backends import (
    DEFAULT_BACKEND,
    STORAGE_BACKENDS,
    Backend,
    backend_environment,
    take_backend,
)
from kvxferd.mover.process.forkserver import _load_library
from kvxferd.mover.transport.nixl import (
    LIBRARIES,
    NixlTransport,
    TransferLibrary,
    join_metadata,
    split_metadata,
)


class FakeApi:
    """As much of NIXL's module as makes agents: its plugins, those that load, and what was created."""

    def __init__(self, *plugins: str, broken: str = "", starts_a_thread: str = "") -> None:
        self.plugins, self.broken, self.starts_a_thread = list(plugins), broken, starts_a_thread
        self.created: list[tuple[str, dict[str, str]]] = []
        self.end = threading.Event()
        self.threads: list[threading.Thread] = []

    def nixl_agent_config(self, **settings: Any) -> Any:
        assert not settings["enable_prog_thread"]
        return SimpleNamespace(**settings)

    def nixl_agent(self, name: str, config: Any) -> Any:
        assert config.backends == []
        return FakeAgent(self)


class FakeBindings:
    def __init__(self, api: FakeApi) -> None:
        self._api = api

    def getPluginParams(self, name: str) -> tuple[dict[str, str], list[str]]:
        if name == self._api.broken:
            raise RuntimeError("NIXL_ERR_NOT_FOUND")
        if name == self._api.starts_a_thread:
            thread = threading.Thread(target=self._api.end.wait)
            thread.start()
            self._api.threads.append(thread)
        return {"size": "1"}, ["DRAM_SEG"]


class FakeAgent:
    def __init__(self, api: FakeApi) -> None:
        self._api, self.agent = api, FakeBindings(api)

    def get_plugin_list(self) -> list[str]:
        return self._api.plugins

    def create_backend(self, name: str, parameters: dict[str, str]) -> None:
        if name not in self._api.plugins:
            raise RuntimeError("NIXL_ERR_NOT_FOUND")
        self._api.created.append((name, parameters))


@pytest.fixture
def api() -> Iterator[FakeApi]:
    made = FakeApi("UCX", "LIBFABRIC", "POSIX", "OBJ", broken="LIBFABRIC")
    yield made
    made.end.set()
    for thread in made.threads:
        thread.join()


def refusal(api: FakeApi, name: str) -> str:
    with pytest.raises(MoverError) as refused:
        TransferLibrary(api, "nixl 9").preload(Backend(name))
    assert refused.value.code is Code.NIXL_UNAVAILABLE
    return refused.value.message


def test_a_plugin_that_is_not_there_is_refused_with_those_that_are(api: FakeApi) -> None:
    assert refusal(api, "Mooncake") == (
        "cannot use mover.backend = Mooncake: there is no such plugin; the installed nixl 9 has the plugins "
        "LIBFABRIC, UCX for memory (and OBJ, POSIX for storage); set mover.backend to one of the former"
    )


def test_storage_is_no_backend_of_movers_though_its_plugin_is_there(api: FakeApi) -> None:
    assert "between memory and storage" in refusal(api, "POSIX")
    assert "UCX" not in STORAGE_BACKENDS


def test_a_plugin_that_does_not_load_is_refused(api: FakeApi) -> None:
    text = refusal(api, "LIBFABRIC")
    assert "installed and does not load (NIXL_ERR_NOT_FOUND)" in text
    assert "use UCX" in text


def test_a_plugin_that_starts_threads_is_refused_because_movers_are_forked(api: FakeApi) -> None:
    api.starts_a_thread, api.broken = "LIBFABRIC", ""
    assert "starts threads" in refusal(api, "LIBFABRIC")


@pytest.mark.parametrize(("name", "text"), [("num_workers", "2"), ("num_threads", "1"), ("num_workers", "")])
def test_more_workers_or_threads_of_ucx_are_refused(api: FakeApi, name: str, text: str) -> None:
    library = TransferLibrary(api, "nixl 9")
    with pytest.raises(MoverError, match=f"cannot use {name} of mover.backend_parameters"):
        library.preload(Backend("UCX", {name: text}))
    library.preload(Backend("UCX", {"num_workers": "1", "num_threads": "0"}))


def test_an_agent_has_the_chosen_backend_alone_with_its_parameters(api: FakeApi) -> None:
    library = TransferLibrary(api, "nixl 9")
    assert NixlTransport(library, AgentName("a")).library == "nixl 9"
    other = NixlTransport(library, AgentName("b"), Backend("LIBFABRIC", {"num_threads": "2"}))
    assert other.library == "nixl 9, LIBFABRIC"
    assert api.created == [("UCX", {}), ("LIBFABRIC", {"num_threads": "2"})]
    with pytest.raises(MoverError, match="of the backend Mooncake: NIXL_ERR_NOT_FOUND"):
        NixlTransport(library, AgentName("c"), Backend("Mooncake"))


@given(st.text(min_size=1), st.dictionaries(st.text(), st.text()))
def test_a_mover_reads_the_backend_that_its_daemon_wrote(name: str, parameters: dict[str, str]) -> None:
    backend = Backend(name, parameters)
    environment = {"PATH": "/bin", **backend_environment(backend)}
    assert take_backend(environment) == backend
    assert environment == {"PATH": "/bin"}


# --- what describes memory of several types at once


@pytest.mark.parametrize("parts", [[b"one"], [b"one", b""], [b"nixl", b"two", bytes(1000)]])
def test_what_is_joined_is_split_and_what_is_cut_is_an_error(parts: list[bytes]) -> None:
    joined = join_metadata(parts)
    assert split_metadata(joined) == parts
    if len(parts) == 1:
        assert joined == parts[0], "one part is the library's own"
        return
    with pytest.raises(msgspec.DecodeError):
        split_metadata(joined[:-1])


# --- what the daemon's operator reads where there is no library


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
