"""The transport that moves bytes between nodes: NIXL with one of its backends, UCX unless set otherwise."""

from __future__ import annotations

import gc
import importlib
import importlib.metadata
import importlib.util
import logging
import os
import sys
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from kvxferd.errors import Code, MoverError
from kvxferd.ids import AgentName
from kvxferd.import_blocking import block_import
from kvxferd.mover.backends import DEFAULT_BACKEND, FIXED_PARAMETERS, STORAGE_BACKENDS, UCX, Backend
from kvxferd.mover.disconnects import ucx_tls_proves_over
from kvxferd.mover.transport.base import (
    HOST,
    MemoryKind,
    MemoryRange,
    ReadHandle,
    ReadKinds,
    TransportError,
    check_agent_name,
)
from kvxferd.mover.transport.ucx_lines import UcxLines
from kvxferd.mover.ucx_settings import set_gpu_defaults
from kvxferd.plan import Runs
from kvxferd.wire.staging import MAX_STAGING_MESSAGE_BYTES

_LOG = logging.getLogger(__name__)

LIBRARIES = ("nixl", "rixl")

# Compared by name, because the bindings' exception classes are in a module whose name depends on the wheel.
_DISCONNECT_ERROR = "nixlRemoteDisconnectError"
_NOT_FOUND_ERROR = "nixlNotFoundError"
# A reader waits for each reply before it requests more: a hundred at a time are many.
MAX_NOTIFICATIONS = 1024
_JOINED_PREFIX = b"kvxferd-joined:"  # the library's own metadata begins otherwise

Uint64s: TypeAlias = npt.NDArray[np.uint64]


class TransferLibrary:
    """The imported library. Made once in the forkserver, and inherited by every mover."""

    def __init__(self, module: Any, description: str) -> None:
        self.api = module
        self.description = description

    def preload(self, backend: Backend = DEFAULT_BACKEND) -> None:
        """Load the plugin (UCX's takes 0.4 s) without making a backend, so that forks stay possible.

        Raises MoverError(nixl-unavailable) where there is no such plugin, or it does not load.
        """
        self.plugin_parameters(backend)
        num_threads = len(os.listdir("/proc/self/task"))
        if backend.name != UCX and num_threads > 1:
            raise MoverError(
                f"cannot use mover.backend = {backend.name}: loading its plugin starts threads, and "
                "movers are forked from that process; use UCX",
                Code.NIXL_UNAVAILABLE,
            )

    def plugin_parameters(self, backend: Backend) -> dict[str, str]:
        """Load the backend's plugin, and return its parameters with their defaults. Raises MoverError."""
        agent = self._agent_without_backends("preload")
        present = sorted(agent.get_plugin_list())
        if why := _why_not(backend.name, present):
            offered = [name for name in present if name not in STORAGE_BACKENDS]
            raise MoverError(
                f"cannot use mover.backend = {backend.name}: {why}; the installed {self.description} has the "
                f"plugins {', '.join(offered) or 'none'} for memory (and {_storage(present)} for storage); "
                "set mover.backend to one of the former",
                Code.NIXL_UNAVAILABLE,
            )
        for parameter, text in FIXED_PARAMETERS.get(backend.name, {}).items():
            if backend.parameters.get(parameter, text) != text:
                raise MoverError(
                    f"cannot use {parameter} of mover.backend_parameters: movers drive {backend.name} from "
                    f"one thread and one worker, and the library fails with more; remove it, or give {text}",
                    Code.NIXL_UNAVAILABLE,
                )
        try:
            # Not the Python class's method, which returns {} where the plugin does not load.
            parameters, _ = agent.agent.getPluginParams(backend.name)
        except Exception as error:
            raise MoverError(
                f"cannot use mover.backend = {backend.name}: its plugin is installed and does not load "
                f"({_text_of(error)}); install what it is linked to (NIXL_LOG_LEVEL=INFO names it), or "
                "use UCX",
                Code.NIXL_UNAVAILABLE,
            ) from error
        return dict(parameters)

    def plugins(self) -> list[str]:
        """Return the names of the backend plugins that are installed."""
        return sorted(self._agent_without_backends("plugins").get_plugin_list())

    def _agent_without_backends(self, name: str) -> Any:
        config = self.api.nixl_agent_config(enable_prog_thread=False, backends=[])
        return self.api.nixl_agent(name, config)


def _why_not(name: str, present: Sequence[str]) -> str:
    """Return why a backend cannot be used by movers; "" where nothing is known against it."""
    if name in STORAGE_BACKENDS:
        return "it moves data between memory and storage, and reads no other node's memory"
    return "" if name in present else "there is no such plugin"


def _storage(present: Sequence[str]) -> str:
    return ", ".join(name for name in present if name in STORAGE_BACKENDS) or "none"


def import_library(use: str = "auto") -> TransferLibrary:
    """Import the named library; auto: nixl, or else rixl. Raises MoverError(nixl-unavailable) with why."""
    _prepare_environment()
    reasons = []
    for name in LIBRARIES if use == "auto" else (use,):
        try:
            module = _import_api(name)
        # A broken install raises whatever its loader raises: OSError for a missing shared object.
        except Exception as error:
            reasons.append(f"{name}: {error}")
            continue
        logging.getLogger("nixl").setLevel(logging.WARNING)
        return TransferLibrary(module, f"{name} {_version(name)}")
    raise MoverError(f"cannot import a transfer library ({'; '.join(reasons)})", Code.NIXL_UNAVAILABLE)


def _prepare_environment() -> None:
    home = os.environ.get("HOME", "")
    if not os.access(home, os.R_OK | os.X_OK):
        os.environ["HOME"] = "/"  # the library looks for a configuration file there, and fails without one
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    set_gpu_defaults(os.environ)


def _import_api(name: str) -> Any:
    # To choose its CUDA wheel nixl reads torch's CUDA version from the disk, and imports torch (0.9 s,
    # 190 MB) only when torch was built without CUDA, to find just that out. Where nixl can do without,
    # torch.version is hidden from it meanwhile.
    hide = importlib.util.find_spec("nixl_meta_utils") is not None and "torch" not in sys.modules
    with block_import("torch.version") if hide else nullcontext():
        return importlib.import_module(f"{name}._api")


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


class NixlRead:
    """A posted transfer request."""

    __slots__ = ("__weakref__", "agent", "done", "request")

    def __init__(self, agent: AgentName, request: Any) -> None:
        self.agent = agent
        self.request = request
        self.done = False


class NixlTransport:
    """One NIXL agent, without its progress thread; see `Transport` for the promises."""

    def __init__(
        self,
        library: TransferLibrary,
        agent: AgentName,
        backend: Backend = DEFAULT_BACKEND,
        ucx_lines: UcxLines | None = None,
    ) -> None:
        """`ucx_lines`: of this process, where it is a mover's own."""
        self._api = library.api
        self._agent = agent
        self._library = library.description + ("" if backend.name == UCX else f", {backend.name}")
        self._setting_proves_over = ucx_tls_proves_over(backend, os.environ.get("UCX_TLS", ""))
        self._ucx_lines = ucx_lines
        self._registered: dict[MemoryRange, Any] = {}
        self._read_handles: weakref.WeakSet[NixlRead] = weakref.WeakSet()
        # Bounded: where this mover never reads them, peers could send any number.
        self._notifications: deque[tuple[AgentName, bytes]] = deque(maxlen=MAX_NOTIFICATIONS)
        # One backend: with several the library would choose for each read, and what an error proves with it.
        config = library.api.nixl_agent_config(enable_prog_thread=False, num_threads=0, backends=[])
        try:
            self._nixl = library.api.nixl_agent(agent, config)
            self._nixl.create_backend(backend.name, dict(backend.parameters))
        except Exception as error:
            raise MoverError(
                f"cannot make a NIXL agent of the backend {backend.name}: {_text_of(error)}",
                Code.NIXL_UNAVAILABLE,
            ) from error
        self._agent_ref = weakref.ref(self._nixl.agent)

    @property
    def agent(self) -> AgentName:
        return self._agent

    @property
    def library(self) -> str:
        return self._library

    def register(self, span: MemoryRange) -> None:
        try:
            self._registered[span] = self._nixl.register_memory(
                [_registration_descriptor(span)], span.mem_type
            )
        except Exception as error:
            raise TransportError(
                f"cannot register {span.size_bytes} bytes: {_text_of(error)}", settled=True
            ) from error

    def deregister(self, span: MemoryRange) -> None:
        descriptors = self._registered.pop(span)
        try:
            self._nixl.deregister_memory(descriptors)
        except Exception as error:
            raise TransportError(f"cannot deregister memory: {_text_of(error)}", settled=True) from error

    def metadata(self, spans: Sequence[MemoryRange]) -> bytes:
        if not spans:
            raise TransportError("cannot describe memory to readers: there is none", settled=True)
        by_type: dict[str, list[MemoryRange]] = {}
        for span in spans:
            by_type.setdefault(span.mem_type, []).append(span)
        try:
            return join_metadata([self._partial_metadata(*alike) for alike in by_type.items()])
        except Exception as error:
            raise TransportError(
                f"cannot describe memory to readers: {_text_of(error)}", settled=True
            ) from error

    def _partial_metadata(self, mem_type: str, spans: Sequence[MemoryRange]) -> bytes:
        descriptors = self._nixl.get_reg_descs([_registration_descriptor(span) for span in spans], mem_type)
        return bytes(self._nixl.get_partial_agent_metadata(descriptors, inc_conn_info=True))

    def load_remote(self, metadata: bytes, agent: AgentName | None = None) -> AgentName:
        try:
            parts = split_metadata(metadata)
        except msgspec.DecodeError as error:
            raise TransportError(f"cannot load a remote agent: {error}", settled=True) from error
        for part in parts:
            check_agent_name(agent_name_in(part), agent)
        try:
            names = {self._nixl.add_remote_agent(part) for part in parts}
        except Exception as error:
            raise TransportError(f"cannot load a remote agent: {_text_of(error)}", settled=True) from error
        if len(names) != 1:
            raise TransportError(f"cannot load a remote agent: it is {len(names)} agents", settled=True)
        (name,) = names
        return AgentName(name.decode() if isinstance(name, bytes) else name)

    def drop_remote(self, agent: AgentName) -> None:
        try:
            self._nixl.remove_remote_agent(agent)
        except Exception as error:
            if type(error).__name__ != _NOT_FOUND_ERROR:
                raise TransportError(f"cannot drop agent {agent}: {_text_of(error)}", settled=True) from error

    def post(self, agent: AgentName, runs: Runs, kinds: ReadKinds = HOST) -> NixlRead:
        try:
            request = self._nixl.initialize_xfer(
                "READ",
                self._descriptors(runs.local, runs.length, kinds.local),
                self._descriptors(runs.remote, runs.length, kinds.remote),
                agent,
            )
        except Exception as error:
            raise TransportError(
                f"cannot read from agent {agent}: {_text_of(error)}", settled=True
            ) from error
        handle = NixlRead(agent, request)
        self._read_handles.add(handle)
        try:
            handle.done = self._nixl.transfer(request) == "DONE"
        except Exception as error:
            raise self._read_error(agent, error) from error
        return handle

    def _descriptors(self, address: Uint64s, length: Uint64s, place: MemoryKind) -> Any:
        rows = np.empty((len(length), 3), dtype=np.uint64)
        rows[:, 0], rows[:, 1], rows[:, 2] = address, length, place.device
        return self._nixl.get_xfer_descs(rows, place.mem_type)

    def poll(self, handle: ReadHandle) -> bool:
        assert isinstance(handle, NixlRead)
        if not handle.done:
            try:
                handle.done = self._nixl.check_xfer_state(handle.request) == "DONE"
            except Exception as error:
                raise self._read_error(handle.agent, error) from error
        return handle.done

    def _read_error(self, agent: AgentName, error: Exception) -> TransportError:
        """Return the error with what a failed transfer proves; for a lost connection see `disconnects`.

        Any other failure of a posted transfer proves nothing, because the library reports the last
        descriptor's error while others may be in flight.
        """
        lost = type(error).__name__ == _DISCONNECT_ERROR
        text = f"cannot read from agent {agent}: {_text_of(error)}"
        return TransportError(text, settled=lost and self._are_reads_over(), lost=lost)

    def _are_reads_over(self) -> bool:
        """Whether no read over a connection that was just lost can write any more."""
        if self._setting_proves_over:
            return True
        return self._ucx_lines is not None and self._ucx_lines.prove_over()

    def release(self, handle: ReadHandle) -> None:
        assert isinstance(handle, NixlRead)
        self._nixl.release_xfer_handle(handle.request)

    def progress(self) -> None:
        # The call for notifications drives UCX.
        for agent, notes in self._nixl.get_new_notifs().items():
            fit = (bytes(note) for note in notes if len(note) <= MAX_STAGING_MESSAGE_BYTES)
            self._notifications.extend((AgentName(agent), note) for note in fit)

    def notify(self, agent: AgentName, payload: bytes) -> None:
        try:
            self._nixl.send_notif(agent, payload)
        except Exception as error:
            raise TransportError(
                f"cannot tell agent {agent} anything: {_text_of(error)}", settled=True
            ) from error

    def receive_notifications(self) -> list[tuple[AgentName, bytes]]:
        self.progress()
        notes = list(self._notifications)
        self._notifications.clear()
        return notes

    def close(self) -> None:
        """End the agent and its reads. Raises MoverError where the agent lives on; then call it again.

        The library's agent ends with its last reference, and every handle holds one.
        """
        if self._nixl is not None:
            for handle in list(self._read_handles):
                handle.request = None
            for span in list(self._registered):
                try:
                    self.deregister(span)
                except TransportError as error:
                    _LOG.warning("memory not deregistered: reason=%s", error.message)
            self._nixl = None
        if self._agent_ref() is not None:
            gc.collect()  # an exception's traceback may hold a handle, in a cycle
        if self._agent_ref() is not None:
            raise MoverError(f"cannot end agent {self._agent}: something still holds it")


def _registration_descriptor(span: MemoryRange) -> tuple[int, int, int, str]:
    return span.address, span.size_bytes, span.device, ""


def join_metadata(parts: Sequence[bytes]) -> bytes:
    """Return one blob of several, because the library describes one type of memory at a time."""
    return parts[0] if len(parts) == 1 else _JOINED_PREFIX + msgspec.msgpack.encode(parts)


def split_metadata(metadata: bytes) -> list[bytes]:
    """Undo `join_metadata`. Raises msgspec.DecodeError."""
    if not metadata.startswith(_JOINED_PREFIX):
        return [metadata]
    return msgspec.msgpack.decode(metadata[len(_JOINED_PREFIX) :], type=list[bytes])


# How NIXL 1.x begins an agent's metadata, its name's length as u64 behind that.
_METADATA_PREFIX = b"nixlSerDes|Agent"


def agent_name_in(metadata: bytes) -> AgentName | None:
    """Return whose metadata it is, None where the format is unknown.

    It is read before the metadata is loaded: NIXL 1.5.1 that fails to load a cut copy of an agent's metadata
    refuses the whole one, too, until the agent is removed.
    """
    if not metadata.startswith(_METADATA_PREFIX):
        return None
    start = len(_METADATA_PREFIX) + 8
    length = int.from_bytes(metadata[len(_METADATA_PREFIX) : start], "little")
    return AgentName(metadata[start : start + length].decode(errors="replace"))


def _text_of(error: Exception) -> str:
    return str(error) or type(error).__name__
