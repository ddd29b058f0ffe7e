"""The file of `peer.curve_allowed_keys_file`: peers' public keys, watched for changes.

A thread looks at the file, because a file system may hang. It looks at the file's metadata and is not
notified: a Kubernetes ConfigMap is a chain of symbolic links, and a network file system notifies of nothing
that another node changes.
"""

from __future__ import annotations

import os
import re
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from kvxferd.errors import ConfigError
from kvxferd.threads import start_thread

# Between two looks. A changed file is read once two looks in a row find it the same, so that a file that is
# edited in place is not read half-written.
POLL_S = 0.5
# 10,000 keys, each with a comment as long as itself.
MAX_FILE_BYTES = 2 << 20
MAX_KEYS = 10_000
STOP_S = 1.0
_KEY = re.compile(r"[0-9a-fA-F]{64}")
_Signature = tuple[int, ...]


class KeysRead(NamedTuple):
    """What the last look at the file found."""

    keys: frozenset[str]
    problem: str = ""  # why the file cannot be used; "": it can, and these are its keys


def read_allowed_keys(path: Path, secret_key_file: str = "") -> frozenset[str]:
    """Return the public keys of the file, in lower case. Raises ConfigError where a line is none."""
    return _read(path, secret_key_file)[0]


def _read(path: Path, secret_key_file: str) -> tuple[frozenset[str], _Signature]:
    what = f"cannot use peer.curve_allowed_keys_file = {str(path)!r}"
    try:
        # O_NONBLOCK, so that opening a FIFO does not wait for a writer.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ConfigError(f"{what}: it is no file; give a file with a public key on each line")
            text = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"{what}: {error.strerror}; make it a file that uid {os.geteuid()} may read, with a public key "
            "on each line"
        ) from error
    if status.st_mode & stat.S_IWOTH:
        raise ConfigError(f"{what}: everybody may write to it, and so admit a peer; chmod o-w {path}")
    if secret_key_file and _is_same_file(status, secret_key_file):
        raise ConfigError(f"{what}: it is peer.curve_secret_key_file; give a file of public keys")
    return _parse(text, what), _signature_of(status)


def _parse(text: bytes, what: str) -> frozenset[str]:
    if len(text) > MAX_FILE_BYTES:
        raise ConfigError(f"{what}: it has more than {MAX_FILE_BYTES} bytes; give public keys alone")
    if not text.strip():
        # What an editor or a redirection leaves for a moment. It must not cut off every peer.
        raise ConfigError(f"{what}: it is empty; to admit no other daemon, write a comment alone")
    keys = set()
    for number, line in enumerate(text.decode(errors="replace").split("\n"), 1):
        key = line.partition("#")[0].strip()
        if not key:
            continue
        # The line is not repeated: it may be a secret that was put here by mistake.
        if not _KEY.fullmatch(key):
            raise ConfigError(
                f"{what}: line {number} holds no public key of 64 hex digits; `kvxferd keygen --public FILE` "
                "prints one, and a comment begins with #"
            )
        keys.add(key.lower())
    if len(keys) > MAX_KEYS:
        raise ConfigError(f"{what}: it holds {len(keys)} keys, and {MAX_KEYS} at most are read")
    return frozenset(keys)


def _is_same_file(status: os.stat_result, path: str) -> bool:
    try:
        other = os.stat(path)
    except OSError:
        return False
    return (status.st_dev, status.st_ino) == (other.st_dev, other.st_ino)


def _signature_of(status: os.stat_result) -> _Signature:
    return (
        status.st_dev,
        status.st_ino,
        status.st_size,
        status.st_mtime_ns,
        status.st_ctime_ns,
        status.st_mode,
    )


class AllowedKeysFile:
    """The keys of the file that were last read, and a thread that reads it again when it changes.

    What cannot be read, because it is absent or no descriptor is left, is tried at each look.

    Raises ConfigError if the first read fails: a daemon that starts has no older list to keep.
    """

    def __init__(self, path: str, secret_key_file: str = "") -> None:
        self._secret_key_file = secret_key_file
        self._lock = threading.Lock()  # guards the three below
        self._path = path
        self._signature: _Signature = ()
        self._found = KeysRead(frozenset())
        self._last_seen: _Signature = ()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._on_read: Callable[[KeysRead], None] | None = None
        self.use(path)

    @property
    def keys(self) -> frozenset[str]:
        """The public keys that the file admits; none without a file."""
        return self._found.keys

    @property
    def problem(self) -> str:
        """Why the file as it is now cannot be used, and what to do; "": it can."""
        return self._found.problem

    def use(self, path: str) -> None:
        """Read this file now, and watch it. "": none. Raises ConfigError, and then nothing changes."""
        keys, signature = _read(Path(path), self._secret_key_file) if path else (frozenset[str](), ())
        with self._lock:
            self._path, self._signature, self._found = path, signature, KeysRead(keys)
        if path and self._on_read is not None:
            self.start(self._on_read)

    def start(self, on_read: Callable[[KeysRead], None]) -> None:
        """Watch the file, if there is one. `on_read` gets each changed result, on the thread that watches.

        Raises ConfigError where the system has no thread.
        """
        self._on_read = on_read
        if not self._path or self._thread is not None:
            return
        thread = threading.Thread(target=self._watch, args=(on_read,), name="allowed-keys", daemon=True)
        start_thread(thread, "watch the file of keys")
        self._thread = thread

    def stop(self) -> None:
        """Stop watching. Idempotent; a thread that waits for a file system is left to it."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(STOP_S)

    def look(self) -> KeysRead | None:
        """Look once; return what is new. A changed file is read once two looks in a row find it the same."""
        path, last_seen = self._path, self._last_seen
        seen = self._last_seen = _look(path)
        if seen != last_seen or seen == self._signature or not path:
            return None
        before = self._found
        try:
            keys, read = _read(Path(path), self._secret_key_file)
            if read != seen:
                return None  # it changes as it is read: the next look decides
            found = KeysRead(keys)
        except ConfigError as error:
            found = KeysRead(before.keys, error.message)
            if isinstance(error.__cause__, OSError):
                seen = ()  # it was not read, perhaps for lack of descriptors: the next look tries again
        with self._lock:
            if path != self._path or self._found is not before:
                return None  # a reload read it meanwhile, or another file
            self._signature, self._found = seen, found
        return found if found != before else None

    def _watch(self, on_read: Callable[[KeysRead], None]) -> None:
        while not self._stopping.wait(POLL_S):
            if (found := self.look()) is not None:
                on_read(found)


def _look(path: str) -> _Signature:
    try:
        return _signature_of(os.stat(path))
    except OSError as error:
        return (error.errno or 0,)
