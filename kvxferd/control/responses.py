"""The form of HTTP responses: JSON values and errors."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web


def json_response(value: Any, status: int = 200) -> web.Response:
    """Return the value, structs included, as a JSON response."""
    return web.Response(body=msgspec.json.encode(value), content_type="application/json", status=status)


def error_response(status: int, code: str, message: str) -> web.Response:
    """Return an error response: a code for machines, a sentence for people."""
    return json_response({"error": {"code": code, "message": message}}, status)
