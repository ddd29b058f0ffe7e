"""What routers of others send to a prefill and a decode engine, and an HTTP server that is one of them.

Written from their sources as they are public in 2026: vLLM's example proxy (`toy_proxy_server.py` among its
tests of the NIXL connector) and llm-d's sidecar, which stands before each decode engine
(`connector_nixlv2.go` of llm-d-inference-scheduler).
"""

from __future__ import annotations

import http.client
import json
import threading
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.support.vllm_servers.completions import ASK_FOR_PREFILL

HOST = "127.0.0.1"
LIMIT_S = 60.0
PREFILLER_HEADER = "x-prefiller-host-port"
TOKEN_LIMITS = ("max_tokens", "max_completion_tokens")


@dataclass(frozen=True)
class Answer:
    """An HTTP response, read whole."""

    status: int
    content_type: str
    text: str

    @property
    def chunks(self) -> list[Any]:
        """Return the JSON of a whole answer, or of each part of a streamed one."""
        if self.content_type != "text/event-stream":
            return [json.loads(self.text)]
        parts = [line.removeprefix("data: ") for line in self.text.split("\n\n") if line]
        assert parts.pop() == "[DONE]"
        return [json.loads(part) for part in parts]


def post(url: str, path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> Answer:
    """Send a request and read its response."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=LIMIT_S)
    try:
        sent = {"Content-Type": "application/json", **(headers or {})}
        connection.request("POST", path, json.dumps(body), sent)
        response = connection.getresponse()
        kind = (response.getheader("Content-Type") or "").partition(";")[0]
        return Answer(response.status, kind, response.read().decode())
    finally:
        connection.close()


class HttpService:
    """An HTTP server in threads of this process. Subclasses have `handle`."""

    def __init__(self) -> None:
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                headers = {name.lower(): value for name, value in self.headers.items()}
                reply = service.handle(self.path, body, headers)
                self.send_response(reply.status)
                self.send_header("Content-Type", reply.content_type)
                self.end_headers()
                self.wfile.write(reply.text.encode())

            def log_message(self, *_: Any) -> None:
                """Print nothing."""

        self._server = ThreadingHTTPServer((HOST, 0), Handler)
        self.host_port = f"{HOST}:{self._server.server_address[1]}"
        self.url = f"http://{self.host_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    def handle(self, path: str, body: dict[str, Any], headers: Mapping[str, str]) -> Answer:
        """Return the response to one request."""
        raise NotImplementedError

    def close(self) -> None:
        """End it; requests that run are waited for."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def error(status: int, why: str) -> Answer:
    """Return the response to a request that is refused."""
    return Answer(status, "application/json", json.dumps({"error": {"message": why, "code": status}}))


@dataclass
class VllmProxy(HttpService):
    """vLLM's example proxy: prefill and decode engines take turns, and both get one request id."""

    prefill: list[str]
    decode: list[str]
    num_handled: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        super().__init__()

    def handle(self, path: str, body: dict[str, Any], headers: Mapping[str, str]) -> Answer:
        turn, self.num_handled = self.num_handled, self.num_handled + 1
        sent = {"X-Request-Id": str(uuid.uuid4()), "Authorization": "Bearer None"}
        dropped = ("stream_options", "min_tokens", "min_completion_tokens")
        wanted = {name: value for name, value in body.items() if name not in dropped}
        wanted |= {"kv_transfer_params": ASK_FOR_PREFILL, "stream": False, "max_tokens": 1}
        if "max_completion_tokens" in body:
            wanted["max_completion_tokens"] = 1
        prefilled = post(self.prefill[turn % len(self.prefill)], path, wanted, sent)
        if prefilled.status != 200:
            return error(500, "the proxy raises for it")
        if params := json.loads(prefilled.text).get("kv_transfer_params"):
            body["kv_transfer_params"] = params
        return post(self.decode[turn % len(self.decode)], path, body, sent)


@dataclass
class LlmdSidecar(HttpService):
    """llm-d's sidecar before a decode engine: a header of the request names the prefill engine."""

    decode: str

    def __post_init__(self) -> None:
        super().__init__()

    def handle(self, path: str, body: dict[str, Any], headers: Mapping[str, str]) -> Answer:
        prefiller = headers.get(PREFILLER_HEADER, "").split(",")[0].strip()
        if not prefiller:
            return post(self.decode, path, body)
        sent = {"x-request-id": str(uuid.uuid4())}
        wanted = {name: value for name, value in body.items() if name != "stream_options"}
        wanted |= {"kv_transfer_params": ASK_FOR_PREFILL, "stream": False, **dict.fromkeys(TOKEN_LIMITS, 1)}
        prefilled = post(f"http://{prefiller}", path, wanted, sent)
        if not 200 <= prefilled.status < 300:
            return Answer(prefilled.status, "text/plain", "")
        params = json.loads(prefilled.text).get("kv_transfer_params")
        return post(self.decode, path, body | {"kv_transfer_params": params}, sent)
