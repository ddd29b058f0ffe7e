"""Fail where a page of the site loads something from outside: scripts, styles, fonts, pictures.

python docs/tools/check_site.py build/site
"""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path

# What a browser loads by itself; an <a> it follows only when somebody clicks.
LOADED = {
    "audio": "src",
    "embed": "src",
    "iframe": "src",
    "image": "href",
    "img": "src",
    "link": "href",
    "object": "data",
    "script": "src",
    "source": "src",
    "video": "src",
}
OUTSIDE = re.compile(r"^(https?:)?//")
# Hosts from which scripts load scripts; other addresses in them are remarks and licences.
IN_SCRIPTS = re.compile(r"https?://[\w.]*(?:unpkg|jsdelivr|cloudflare|googleapis|gstatic)[\w./@-]*")
IN_STYLES = re.compile(r"(?:url\(|@import)\s*[\"']?((?:https?:)?//[^\"')\s;]+)")


class Loads(HTMLParser):
    """Collects what a page loads from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Look at one tag."""
        given = dict(attrs)
        target = given.get(LOADED.get(tag, "")) or ""
        if OUTSIDE.match(target) and given.get("rel") not in ("canonical", "next", "prev"):
            self.found.append(f"<{tag}> {target}")
        # The theme loads mermaid from outside as soon as a page has such an element.
        if "mermaid" in (given.get("class") or "").split():
            self.found.append(f"<{tag} class=mermaid>")
        self.found += [f"style: {url}" for url in IN_STYLES.findall(given.get("style") or "")]


def loads_of(path: Path) -> list[str]:
    """Return what a file of the site loads from outside."""
    text = path.read_text("utf-8", "replace")
    if path.suffix == ".js":
        return IN_SCRIPTS.findall(text)
    if path.suffix == ".css":
        return IN_STYLES.findall(text)
    page = Loads()
    page.feed(text)
    styles = re.findall(r"<style[^>]*>(.*?)</style>", text, re.DOTALL)
    return page.found + [url for style in styles for url in IN_STYLES.findall(style)]


def main(site: Path) -> int:
    """Print what is found. Returns the exit status."""
    files = [path for path in sorted(site.rglob("*")) if path.suffix in (".html", ".css", ".js")]
    found = [f"{path.relative_to(site)}: {load}" for path in files for load in loads_of(path)]
    for line in found:
        print(line)
    print(f"{len(files)} pages, styles and scripts, {len(found)} things loaded from outside")
    return 1 if found or not files else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
