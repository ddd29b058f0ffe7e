"""The form of HTTP responses: JSON values and errors."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from kvxferd.control.status_page.style import HEADERS


def json_response(value: Any, status: int = 200) -> web.Response:
    """Return the value, structs included, as a JSON response."""
    return web.Response(body=msgspec.json.encode(value), content_type="application/json", status=status)


def page_response(text: str, status: int = 200) -> web.Response:
    """Return HTML, with a policy that lets a browser load nothing else."""
    return web.Response(text=text, content_type="text/html", status=status, headers=HEADERS)


def error_response(status: int, code: str, message: str) -> web.Response:
    """Return an error response: a code for machines, a sentence for people."""
    return json_response({"error": {"code": code, "message": message}}, status)
