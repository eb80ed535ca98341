"""What `mkdocs build` adds to the pages in docs: those made from the code, and links that work on the site.

The pages in docs are written for a code host too, so they link to the repository's files. On the site a link
to `../src/a.py` leads to that file's page, and so does the path of a source file in a code span. Two
blocks of code with a bold title each stand beside each other.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import Any

import errors
import links
import pictures
import sources
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
INDEX = sources.Index(sources.read(ROOT))
PATHS = {source.path for source in INDEX.sources}
# Files of the repository that are pages of the site.
ALSO = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "benchmarks/RESULTS.md": "results.md",
    "benchmarks/TABLES.md": "tables.md",
    "benchmarks/CLAIMS.md": "claims.md",
    "benchmarks/README.md": "benchmarks.md",
    "benchmarks/results.svg": "results.svg",
    "benchmarks/scale.svg": "scale.svg",
    "benchmarks/soak.svg": "soak.svg",
    "LICENSE": "LICENSE.txt",
}
# What the code host shows as a part of a page, and the site as a page.
PARTS = {"docs/fsdp.md#errors": "errors.md", "ARCHITECTURE.md#words": "glossary.md"}
# Packages whose public names have a page of reference.
PUBLIC = ("", "optim", "nn", "checkpoint", "sharded_tensor", "tensor_parallel", "comm", "verify")
FENCED = re.compile(r"^(`{3,4})\w*.*?^\1$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(\[[^\]]*\])\(([^)\s]+)\)")
PATH_SPAN = re.compile(r"(?<!\[)`((?:src|tests|examples|benchmarks|docs)/[\w./]+)`(?!\])")
TITLED = r"\*\*([^*\n]+)\*\*\n\n((?:<!--[^\n]*-->\n+)?```python\n.*?^```\n)"
BESIDE = re.compile(rf"^{TITLED}\n{TITLED}", re.MULTILINE | re.DOTALL)
NOT_RUN = re.compile(r"^<!-- not run: (.+) -->$", re.MULTILINE)


def on_files(files: Files, *, config: Any) -> Files:
    for uri, text in generated():
        files.append(File.generated(config, uri, content=text))
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, pictures.__file__, folder], check=True, capture_output=True)
        for path in sorted(Path(folder).iterdir()):
            files.append(File.generated(config, f"pictures/{path.name}", content=path.read_text()))
    return files


def generated() -> Iterator[tuple[str, str]]:
    """(path within the site, contents) of what is made from the repository."""
    for path, uri in ALSO.items():
        if uri != "index.md":
            text = (ROOT / path).read_text(encoding="utf-8")
            yield uri, for_site(text, path=path, uri=uri) if path.endswith(".md") else text
    yield "glossary.md", glossary((ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8"))
    yield errors.PAGE, errors.page(INDEX.sources, (ROOT / "docs" / "fsdp.md").read_text(encoding="utf-8"))
    yield from api_pages()
    yield from sources.pages(INDEX)


def on_page_markdown(markdown: str, *, page: Page, **_: Any) -> str:
    uri = page.file.src_uri
    if page.file.generated_by is None:
        markdown = for_site(markdown, path=f"docs/{uri}", uri=uri)
    if BESIDE.search(markdown):
        page.meta["hide"] = ["toc"]  # room for two blocks
        markdown = BESIDE.sub(_beside, markdown)
    return NOT_RUN.sub(r'<p class="not-run">Not run by the tests: \1.</p>', markdown)


def on_post_build(*, config: Any) -> None:
    site = Path(config["site_dir"])
    broken, elsewhere = links.check(site)
    site.with_name("links_elsewhere.txt").write_text("\n".join([*elsewhere, ""]), encoding="utf-8")
    if broken:
        raise PluginError("\n  ".join([f"{len(broken)} broken links:", *broken]))


def _beside(found: re.Match[str]) -> str:
    cells = [f"<div markdown>\n\n**{found[i]}**\n\n{found[i + 1]}\n</div>" for i in (1, 3)]
    return "\n".join(['<div class="beside" markdown>', *cells, "</div>", ""])


def for_site(text: str, *, path: str, uri: str) -> str:
    """A page of the repository with links as the site has them; code blocks stay as they are."""
    here = PurePosixPath(path).parent.as_posix()
    away = PurePosixPath(uri).parent.as_posix()

    def target(of: str) -> str | None:
        """Where a file or folder of the repository is on the site."""
        if of in ALSO:
            return ALSO[of]
        if of in PATHS:
            return f"source/{of}.md"
        if of.rstrip("/") in INDEX.folders:
            return f"source/{of.rstrip('/')}/index.md"
        return of.removeprefix("docs/") if of.startswith("docs/") else None

    def moved(found: re.Match[str]) -> str:
        shown, link = found.groups()
        to, _, anchor = link.partition("#")
        if not to or re.match(r"\w+:", link):
            return found[0]
        of = normpath(f"{here}/{to}")
        if part := PARTS.get(f"{of}#{anchor}"):
            return f"{shown}({relpath(part, away)})"
        uri = target(of)
        return f"{shown}({relpath(uri, away)}{'#' if anchor else ''}{anchor})" if uri else found[0]

    def linked(found: re.Match[str]) -> str:
        uri = target(found[1]) if found[1] in PATHS or found[1].rstrip("/") in INDEX.folders else None
        return f"[{found[0]}]({relpath(uri, away)})" if uri else found[0]

    parts, last = [], 0
    for fence in FENCED.finditer(text):
        prose = text[last : fence.start()]
        parts += [PATH_SPAN.sub(linked, LINK.sub(moved, prose)), fence[0]]
        last = fence.end()
    return "".join([*parts, PATH_SPAN.sub(linked, LINK.sub(moved, text[last:]))])


def glossary(architecture: str) -> str:
    """The table of words, in alphabetical order."""
    section = architecture.split("\n## Words\n")[1].split("\n## ")[0]
    rows = sorted(
        re.findall(r"^\| ([^|]+) \| (.+) \|$", section, re.MULTILINE)[1:], key=lambda row: row[0].lower()
    )
    lines = ["# Glossary", "", "Each word means one thing in the library and in these pages.", ""]
    lines += ["| word | meaning |", "|---|---|", *(f"| **{word}** | {meaning} |" for word, meaning in rows)]
    return "\n".join(
        [*lines, "", "rank, mesh, placement, shard, all-gather and reduce-scatter are torch's words.", ""]
    )


def api_pages() -> Iterator[tuple[str, str]]:
    """A page for each public package: what its `__all__` names."""
    lines = [
        "# API reference",
        "",
        "Public names, made from their docstrings.",
        "",
        "| package | names |",
        "|---|---|",
    ]
    for package in PUBLIC:
        dotted = f"shardwise.{package}".rstrip(".")
        source = INDEX.by_path["/".join(["src", *dotted.split("."), "__init__.py"])]
        page = f"{package or 'shardwise'}.md"
        where = {}
        for name in public_names(source):
            of_module = f"{source.folder}/{name}.py" in PATHS  # which has the name as well
            where[name] = f"{dotted}.{name}.{name}" if of_module else f"{dotted}.{name}"
        shown = ", ".join(f"[`{name}`]({page}#{at})" for name, at in where.items())
        lines.append(f"| [`{dotted}`]({page}) | {shown} |")
        text = [f"# {dotted}", "", sources.prose(source.purpose), ""]
        for at in where.values():
            text += [f"::: {at}", ""]
        yield f"api/{page}", "\n".join(text)
    yield "api/index.md", "\n".join([*lines, ""])


def public_names(source: sources.Source) -> list[str]:
    """`__all__` of a package, or of the stub that says what it imports when asked for."""
    stub = (ROOT / source.path).with_suffix(".pyi")
    for node in ast.parse(stub.read_text(encoding="utf-8") if stub.exists() else source.text).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return sorted(ast.literal_eval(node.value), key=str.lower)
    raise LookupError(f"{source.path} has no __all__")
