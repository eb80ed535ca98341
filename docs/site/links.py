"""Every link of a built site: those inside it must lead to a page and an anchor that exist.

    python docs/site/links.py build/site

prints the broken ones and exits with 1 if there are any. Links to elsewhere are listed, never fetched.
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from posixpath import normpath
from urllib.parse import unquote, urlsplit


class _Page(HTMLParser):
    """The links and anchors of one page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" or (tag == "a" and name == "name"):
                self.anchors.add(value or "")
            elif name in ("href", "src") and value is not None:
                self.links.append(value)


def check(site: Path) -> tuple[list[str], list[str]]:
    """(what is broken, as "page -> link"; links to elsewhere), each once and sorted."""
    pages = {
        path.relative_to(site).as_posix(): _Page(path.read_text(encoding="utf-8"))
        for path in sorted(site.rglob("*.html"))
    }
    broken, elsewhere = set(), set()
    for page, content in pages.items():
        for url in content.links:
            parts = urlsplit(url)
            if parts.scheme or parts.netloc:
                elsewhere.add(url)
            elif not _leads(site, pages, page, parts.path, unquote(parts.fragment)):
                broken.add(f"{page} -> {url}")
    return sorted(broken), sorted(url for url in elsewhere if not url.startswith("data:"))


def _leads(site: Path, pages: dict[str, _Page], page: str, path: str, anchor: str) -> bool:
    base = Path(page).parent.as_posix()
    target = normpath(f"{base}/{unquote(path)}") if path else page
    if path.startswith("/"):  # the page for what is not found has such links
        target = unquote(path).lstrip("/") or "."
    if (site / target).is_dir():
        target = normpath(f"{target}/index.html")
    if not (site / target).is_file():
        return False
    return not anchor or target not in pages or anchor in pages[target].anchors or anchor == "__top"


def main() -> None:
    broken, elsewhere = check(Path(sys.argv[1]))
    print(f"{len(elsewhere)} links to elsewhere, not fetched:", *elsewhere, sep="\n  ")
    print(f"{len(broken)} broken links", *broken, sep="\n  ")
    sys.exit(bool(broken))


if __name__ == "__main__":
    main()
