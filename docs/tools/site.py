"""Hooks of mkdocs: the order of the pages, pictures, and links that lead out of docs/."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[1]

# Title, and the pages below it; a pattern stands for all pages that match and have no place of their own.
ORDER = (
    ("Tutorials", ("tutorial/hello.md", "tutorial/*.md")),
    ("How to", ("how-to/index.md", "how-to/*.md")),
    ("Understand", ("concepts.md", "architecture.md")),
    ("Reference", ("reference/cli.md", "reference/configuration.md", "reference/*.md")),
    ("Evidence", ("evidence/*.md",)),
    ("Decisions", ("decisions.md", "adr/*.md")),
)


def on_config(config: Any) -> Any:
    """Set the menu, and draw pictures where a page has a block of mermaid."""
    config.nav = [{"Start": "index.md"}]
    for title, patterns in ORDER:
        found = [page for pattern in patterns for page in sorted(DOCS.glob(pattern))]
        if found:
            config.nav.append({title: [_entry(page) for page in dict.fromkeys(found)]})
    fences = config.mdx_configs.setdefault("pymdownx.superfences", {}).setdefault("custom_fences", [])
    fences.append({"name": "mermaid", "class": "diagram", "format": _picture})
    return config


def _entry(page: Path) -> Any:
    """Return a page's entry of the menu: the number of a decision stands before its title."""
    name = page.relative_to(DOCS).as_posix()
    if page.parent.name != "adr":
        return name
    heading = page.read_text().partition("\n")[0].removeprefix("# ")
    return {f"{page.name[:4]} {heading}": name}


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Leave only the text of links to files that are not of the site: sources, settings, folders."""
    here = DOCS / Path(page.file.src_uri).parent
    # A search is for what to do or to know now; records and measurements would be a quarter of its entries.
    if page.file.src_uri.startswith(("adr/", "evidence/", "decisions.md")):
        page.meta["search"] = {"exclude": True}

    def kept(match: re.Match[str]) -> str:
        text, target = match.groups()
        name = target.partition("#")[0]
        if not name or re.match(r"[a-z]+:", name):
            return match[0]
        path = (here / name).resolve()
        # A page that should be there and is not stays a link: mkdocs refuses it.
        return match[0] if DOCS in path.parents and not path.is_dir() else text

    return re.sub(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)", kept, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Write a docstring's `::` before a block of code as one colon."""
    return html.replace("::</p>", ":</p>")


def on_post_build(config: Any) -> None:
    """Take the theme's two fallbacks from its script: it would load them from outside.

    One draws diagrams, which are drawn already; the other is for browsers of before 2020.
    """
    for script in Path(config.site_dir, "assets", "javascripts").glob("*.js"):
        script.write_text(
            re.sub(r"https://unpkg\.com/[\w@./-]*", "data:text/javascript,", script.read_text())
        )


def _picture(source: str, *_: Any, **__: Any) -> str:
    """Return a diagram as SVG. The theme would load mermaid from outside and draw it in the browser."""
    import mermaidx

    svg = mermaidx.render('%%{init: {"theme": "neutral"}}%%\n' + source).svg()
    # Ids are the page's, which may have several diagrams.
    svg = svg.replace("my-svg", f"diagram-{hashlib.sha256(source.encode()).hexdigest()[:8]}")
    return f'<div class="diagram" style="background: white; padding: 1em">{svg}</div>'
