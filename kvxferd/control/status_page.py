"""The status page: one file, whose script shows the JSON routes, and the policy that it is sent with."""

from __future__ import annotations

import re
from base64 import b64encode
from hashlib import sha256
from pathlib import Path

from aiohttp import web

PAGE = Path(__file__).with_name("status_page.html").read_text(encoding="utf-8")


def _hash_of(element: str) -> str:
    """Return the policy's source for the page's only element of that name."""
    (text,) = re.findall(f"<{element}>(.*?)</{element}>", PAGE, re.DOTALL)
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


# No address but this one, no other script or style, no form, no frame around it. The script itself cannot
# make HTML of a text: the browser refuses every such assignment, because no trusted types are allowed.
HEADERS = {
    "Content-Security-Policy": (
        f"default-src 'none'; style-src {_hash_of('style')}; script-src {_hash_of('script')}; "
        "connect-src 'self'; img-src data:; require-trusted-types-for 'script'; trusted-types 'none'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def page_response() -> web.Response:
    """Return the page, with a policy that lets a browser load nothing else."""
    return web.Response(text=PAGE, content_type="text/html", headers=HEADERS)
