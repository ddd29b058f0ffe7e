"""A client of the daemon's control socket: HTTP over `control.sock`."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

import msgspec

from kvxferd.errors import Code, KvxferdError

# The daemon responds from memory; one that does not in this time is stuck.
RESPONSE_TIMEOUT_S = 10.0
MAX_BODY_BYTES = 64 << 20  # several times a full node's
SOCKET_NAME = "control.sock"  # in the daemon's run directory


def control_socket_path(path: str) -> str:
    """Return the socket in a directory, such as the daemon's `node.run_dir`; any other path as it is."""
    return os.path.join(path, SOCKET_NAME) if os.path.isdir(path) else path


class ControlClient:
    """The daemon behind one control socket."""

    def __init__(self, socket_path: str, timeout_s: float = RESPONSE_TIMEOUT_S) -> None:
        self.socket_path = socket_path
        self._timeout_s = timeout_s

    def get(self, path: str) -> Any:
        """Return the decoded response. Raises KvxferdError for a refusal, and if there is no response."""
        status, value = self.request("GET", path)
        return _value_or_raise(status, value)

    def post(self, path: str, arguments: Mapping[str, str] | None = None, wait_forever: bool = False) -> Any:
        """As `get`, for a request that changes something. With `wait_forever` there is no timeout."""
        query = f"?{urlencode(arguments)}" if arguments else ""
        status, value = self.request("POST", path + query, wait_forever)
        return _value_or_raise(status, value)

    def read(self, path: str) -> bytes:
        """Return the response's body as it is. Raises KvxferdError as `get` does."""
        status, body = self._exchange("GET", path)
        if status >= 400 and path != "/readyz":  # which reports that the node is not ready by 503
            raise KvxferdError(f"cannot GET {path}: {body[:300].decode(errors='replace')}")
        return body

    def request(self, method: str, path: str, wait_forever: bool = False) -> tuple[int, Any]:
        """Return the response's status and its JSON. Raises KvxferdError if there is no response."""
        status, response = self._exchange(method, path, wait_forever)
        try:
            return status, msgspec.json.decode(response)
        except msgspec.DecodeError as error:
            raise self._connection_error(error) from error

    def _exchange(self, method: str, path: str, wait_forever: bool = False) -> tuple[int, bytes]:
        # Imported here: a verb is also imported to complete its options in a shell.
        from http.client import HTTPConnection, HTTPException

        connection = HTTPConnection("kvxferd")
        try:
            connection.sock = socket.socket(socket.AF_UNIX)
            connection.sock.settimeout(None if wait_forever else self._timeout_s)
            connection.sock.connect(self.socket_path)
            connection.request(method, path)
            response = connection.getresponse()
            received = response.read(MAX_BODY_BYTES + 1)
            if len(received) > MAX_BODY_BYTES:
                raise HTTPException(f"its response has more than {MAX_BODY_BYTES >> 20} MiB")
            return response.status, received
        except (OSError, HTTPException) as error:
            raise self._connection_error(error) from error
        finally:
            connection.close()

    def _connection_error(self, error: Exception) -> KvxferdError:
        from http.client import BadStatusLine

        match error:
            case FileNotFoundError() | ConnectionRefusedError():
                why = (
                    "no daemon is there; start one with 'kvxferd serve', or name the socket of the one that "
                    "runs with --socket or KVXFERD_CONTROL_SOCKET"
                )
            case PermissionError():
                why = "this user may not connect; run as root or as a member of the socket's group"
            case TimeoutError():
                why = f"it has not answered for {self._timeout_s:g} s; see its log"
            case BadStatusLine():
                why = f"it speaks no HTTP; name the daemon's {SOCKET_NAME}, not its worker socket"
            case _:
                why = str(error) or type(error).__name__
        return KvxferdError(f"cannot ask the daemon at {self.socket_path}: {why}", Code.DAEMON_LOST)


def _value_or_raise(status: int, value: Any) -> Any:
    if status < 400:
        return value
    try:
        refusal = msgspec.convert(value["error"], dict[str, str])
        code, message = refusal["code"], refusal["message"]
    except (KeyError, TypeError, msgspec.ValidationError):
        code, message = Code.INTERNAL.value, f"cannot do it: the daemon answered {status}"
    raise KvxferdError(message, Code(code) if code in Code._value2member_map_ else Code.INTERNAL)
