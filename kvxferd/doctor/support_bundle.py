"""Collects what helps to look into a failure, in one tar.gz without secrets: `kvxferd support-bundle`.

Every part is collected by itself. A part that fails, because the daemon is dead or hangs, is listed in the
manifest with the reason, and the others are still there.
"""

from __future__ import annotations

import base64
import gzip
import io
import json
import os
import platform
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus

import msgspec
from zmq.utils import z85

import kvxferd
from kvxferd.config import Config, LoadedConfig, settings_in_effect
from kvxferd.doctor.isolated import call_isolated, isolated
from kvxferd.doctor.report import Finding, context_of, exit_status, run_checks
from kvxferd.errors import KvxferdError
from kvxferd.redaction import is_secret_name, redact, redact_value
from kvxferd.tooling.control_client import ControlClient
from kvxferd.unix_socket import listening_pid

SECRETS_NOTE = (
    "left out: texts of secret settings and variables, and what looks like a key; (key ...) is a "
    "fingerprint, the same for the same key"
)
# Of one part. The largest is the history: records of a few hundred bytes each.
MAX_PART_BYTES = 64 << 20
MAX_THREADS = 256
MAX_TEXT_FILE_BYTES = 256 << 10
RESPONSE_TIMEOUT_S = 5.0
DOCTOR_TIMEOUT_S = 120.0
SOCKET_TIMEOUT_MESSAGE = "the daemon does not answer"

# The daemon's routes, each with the name of its file.
ROUTES = {
    "status.json": "/v1/status",
    "ready.json": "/readyz",
    "engines.json": "/v1/engines",
    "peers.json": "/v1/peers",
    "transfers.json": "/v1/transfers",
    "topology.json": "/v1/topology",
    "history.json": "/v1/history?limit=512",
    "failed.json": "/v1/history?limit=512&failed=true",
    "samples.json": "/v1/samples",
    "metrics.txt": "/metrics",
    "running_configuration.json": "/v1/config",
    "log.json": "/v1/log",
}
PACKAGES = ("kvxferd", "nixl", "nixl-cu12", "nixl-cu13", "rixl", "pyzmq", "msgspec", "aiohttp", "uvloop",
            "numpy", "torch", "vllm", "prometheus-client", "structlog")  # fmt: skip


class CollectedParts:
    """The parts that were collected so far. Every text goes through `redact` on its way in."""

    def __init__(self, known: Collection[str]) -> None:
        self._known = known
        self.texts: dict[str, bytes] = {}
        self.missing: dict[str, str] = {}  # the part's name, and why it is not there

    def add(self, name: str, collect: Callable[[], Any]) -> None:
        """Collect a part: text (`.txt`), or data that JSON can hold."""
        try:
            found = collect()
            if name.endswith(".txt"):
                text = redact(str(found), self._known)
            else:
                text = json.dumps(redact_value(found, self._known), indent=1, default=str)
            encoded = text.encode("utf-8", "backslashreplace")
            if len(encoded) > MAX_PART_BYTES:
                raise ValueError(f"it has {len(encoded)} bytes, more than {MAX_PART_BYTES}")
            self.texts[name] = encoded
        except Exception as error:  # a part that fails must not cost the others
            why = error.message if isinstance(error, KvxferdError) else f"{type(error).__name__}: {error}"
            self.skip(name, why)

    def skip(self, name: str, why: str) -> None:
        """List a part that is not there."""
        self.missing[name] = redact(why, self._known)[:1000]

    def manifest(self) -> dict[str, Any]:
        """Return the bundle's first file: when and by what it was made, all parts, and what is missing."""
        return {
            "kvxferd": kvxferd.__version__,
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "files": {name: len(text) for name, text in self.texts.items()},
            "missing": self.missing,
            "secrets": SECRETS_NOTE,
        }


def collect(
    loaded: LoadedConfig | None,
    config_path: Path | None,
    config_problem: str,
    socket_path: str,
    with_doctor: bool,
) -> CollectedParts:
    """Collect everything. `loaded` is None where it cannot be read, for the reason of `config_problem`."""
    parts = CollectedParts(known_secrets(loaded.config if loaded else None, os.environ))
    parts.add("versions.json", versions)
    parts.add("host.json", host)
    if loaded is None:
        parts.skip("configuration.json", config_problem)
    else:
        parts.add("configuration.json", lambda: settings_in_effect(loaded))
    parts.add("process.json", lambda: process_of(socket_path))
    _collect_from_daemon(parts, ControlClient(socket_path, RESPONSE_TIMEOUT_S))
    if with_doctor:
        parts.add("doctor.json", lambda: doctor_report(socket_path, config_path))
    else:
        parts.skip("doctor.json", "--no-doctor was given")
    return parts


def _collect_from_daemon(parts: CollectedParts, daemon: ControlClient) -> None:
    for name, route in ROUTES.items():
        if any(SOCKET_TIMEOUT_MESSAGE in why for why in parts.missing.values()):
            parts.skip(name, f"{SOCKET_TIMEOUT_MESSAGE}: it did not for another file")
            continue

        def read(route: str = route, name: str = name) -> Any:
            try:
                text = daemon.read(route)
            except KvxferdError as error:
                if not isinstance(error.__cause__, TimeoutError):
                    raise
                raise KvxferdError(f"{SOCKET_TIMEOUT_MESSAGE}: {error.message}", error.code) from error
            return text.decode(errors="replace") if name.endswith(".txt") else msgspec.json.decode(text)

        parts.add(name, read)


def known_secrets(config: Config | None, environ: Mapping[str, str]) -> set[str]:
    """Return the secrets that this process can know, in each form in which they may be written."""
    known = {text for name, text in environ.items() if is_secret_name(name) and not _is_path(text)}
    if config is not None:
        for table in (config.mover.environment, config.mover.backend_parameters):
            known |= {text for name, text in table.items() if is_secret_name(name)}
        known |= _secret_key(config.peer.curve_secret_key_file)
    forms: tuple[Callable[[str], str], ...] = (str, quote, quote_plus, lambda text: json.dumps(text)[1:-1])
    written = {form(text) for text in known for form in forms}
    return {text for text in written if text}


def _secret_key(path: str) -> set[str]:
    """Return the key of that file as it may be written; nothing where it cannot be read."""
    try:
        # O_NONBLOCK: opening a FIFO does not wait for a writer.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            text = (file.read(4096) or b"").decode("ascii").strip()
        secret = bytes.fromhex(text)
    except (OSError, ValueError):
        return set()
    if not secret:
        return set()
    return {text, text.upper(), z85.encode(secret).decode(), repr(secret), base64.b64encode(secret).decode()}


def _is_path(text: str) -> bool:
    """Whether a variable names a file, which is no secret. A secret in base64 may begin with a slash too."""
    return text.startswith("/") and os.path.exists(text)


def versions() -> dict[str, Any]:
    """Return the versions of this environment's software; of UCX, the library's own."""
    found: dict[str, Any] = {
        "python": sys.version,
        "executable": sys.executable,
        "kvxferd": kvxferd.__version__,
    }
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    found["libc"] = " ".join(platform.libc_ver())
    found["ucx"] = _output_of(["ucx_info", "-v"])
    return found


def _output_of(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"not known: {error}; doctor.json has the version that NIXL reports"
    return done.stdout[:4096]


def host() -> dict[str, Any]:
    """Return what holds for the node: kernel, processors, memory, load."""
    return {
        "kernel": " ".join(platform.uname()),
        "os": _text_of("/etc/os-release"),
        "processors": os.cpu_count(),
        "affinity": len(os.sched_getaffinity(0)),
        "load": _text_of("/proc/loadavg"),
        "memory": _text_of("/proc/meminfo"),
        "pressure": {name: _text_of(f"/proc/pressure/{name}") for name in ("cpu", "memory", "io")},
        "cgroup": _text_of("/proc/self/cgroup"),
        "uid": os.geteuid(),
    }


def process_of(socket_path: str) -> dict[str, Any]:
    """Return what the kernel tells of the daemon's process: also of one that hangs.

    Raises KvxferdError where no process listens.
    """
    try:
        pid = listening_pid(Path(socket_path))
    except OSError as error:
        raise KvxferdError(f"cannot find the daemon's process at {socket_path}: {error.strerror}") from error
    if not pid:
        raise KvxferdError(f"cannot find the daemon's process: none listens at {socket_path}")
    proc = Path(f"/proc/{pid}")
    threads = sorted(int(task.name) for task in (proc / "task").iterdir())[:MAX_THREADS]
    return {
        "pid": pid,
        "command": _text_of(proc / "cmdline").replace("\0", " "),
        "status": _text_of(proc / "status"),
        "limits": _text_of(proc / "limits"),
        "io": _text_of(proc / "io"),
        "descriptors": _count(proc / "fd"),
        "threads": {
            thread: {
                name: _text_of(proc / "task" / str(thread) / name)
                for name in ("comm", "stat", "wchan", "syscall", "stack")
            }
            for thread in threads
        },
    }


def doctor_report(socket_path: str, config_path: Path | None) -> dict[str, Any]:
    """Return the report of `kvxferd doctor`, made in a process of its own, which may hang."""
    with isolated(object, os.environ) as child:
        return call_isolated(child, DOCTOR_TIMEOUT_S, _examine, socket_path, config_path)


def _examine(_: object, socket_path: str, config_path: Path | None) -> dict[str, Any]:
    findings: list[Finding] = []
    node = context_of(config_path, socket_path, findings)
    findings += run_checks(node)
    return {"findings": msgspec.to_builtins(findings), "status": exit_status(findings)}


def write(parts: CollectedParts, output: Path) -> None:
    """Write the bundle, mode 0600. Raises KvxferdError if the file is there, or cannot be written."""
    texts = {"manifest.json": json.dumps(parts.manifest(), indent=1).encode(), **parts.texts}
    try:
        fd = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise KvxferdError(
            f"cannot write a support bundle to {output}: {error.strerror}; give --output another file"
        ) from error
    directory = output.name.removesuffix(".tgz").removesuffix(".gz").removesuffix(".tar")
    try:
        with (
            os.fdopen(fd, "wb") as file,
            gzip.GzipFile(filename="", mode="wb", fileobj=file) as packed,
            tarfile.open(fileobj=packed, mode="w") as archive,
        ):
            for name, text in texts.items():
                entry = tarfile.TarInfo(f"{directory}/{name}")
                entry.size, entry.mode, entry.mtime = len(text), 0o600, int(time.time())
                archive.addfile(entry, io.BytesIO(text))
    except OSError as error:
        output.unlink(missing_ok=True)
        raise KvxferdError(
            f"cannot write a support bundle to {output}: {error.strerror}; give --output a file where there "
            "is room"
        ) from error


def _text_of(path: str | Path) -> str:
    """Return the text of a file; why it cannot be read, where it cannot."""
    try:
        with open(path, "rb") as file:
            return file.read(MAX_TEXT_FILE_BYTES).decode(errors="replace")
    except OSError as error:
        return f"(not read: {error.strerror})"


def _count(directory: Path) -> int | str:
    try:
        return len(os.listdir(directory))
    except OSError as error:
        return f"(not read: {error.strerror})"
