"""What the pages about source files say, read from the code itself, without importing it.

`read(root)` parses every Python file under `FOLDERS` once: its purpose (the module's docstring), symbols,
imports and words. `Index` turns these around: who imports a file, which tests cover it, which words are its
own among all others. `pages` writes it down as Markdown, by the path of the page within the site.
"""

from __future__ import annotations

import ast
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from posixpath import relpath

FOLDERS = ("src", "examples", "benchmarks", "docs", "tests")
IMPORT_ROOTS = ("src", "tests", ".", "examples", "docs/site")  # as pyproject.toml has them for pytest
SHOWN = ("src", "examples")  # whose pages end with the file itself
KEYWORDS, FOLDER_KEYWORDS = 12, 20
# Words of English and of Python that say nothing about a file, however rare they are.
COMMON = frozenset(Path(__file__).with_name("common_words.txt").read_text().split())


@dataclass(frozen=True)
class Symbol:
    """A class, function or constant that a file defines at its top."""

    kind: str
    name: str
    signature: str
    line: int
    about: str  # the first sentence of its docstring


@dataclass(frozen=True)
class Source:
    path: str  # within the repository
    purpose: str
    symbols: tuple[Symbol, ...]
    imports: tuple[str, ...]  # paths of the project's files
    outside: tuple[str, ...]  # packages of others
    words: Counter[str]
    text: str
    tree: ast.Module

    @property
    def page(self) -> str:
        return f"source/{self.path}.md"

    @property
    def folder(self) -> str:
        return str(PurePosixPath(self.path).parent)

    @property
    def headline(self) -> str:
        return first_sentence(self.purpose) or "No description."


def read(root: Path, folders: Sequence[str] = FOLDERS) -> list[Source]:
    """Every source file of these folders of the project, by path."""
    paths = sorted(
        path.relative_to(root).as_posix()
        for folder in folders
        for path in (root / folder).rglob("*.py")
        if "__pycache__" not in path.parts
    )
    known = set(paths)
    return [_parse(path, (root / path).read_text(encoding="utf-8"), known) for path in paths]


def _parse(path: str, text: str, known: set[str]) -> Source:
    tree = ast.parse(text)
    imports, outside = set(), set()
    for name in _imported(tree, path):
        if inner := _file_of(name, known):
            imports.add(inner)
        elif "." not in name or not _file_of(name.split(".")[0], known):
            outside.add(name.split(".")[0])
    purpose = ast.get_docstring(tree) or ""
    symbols = tuple(_symbols(tree, text))
    words = Counter(words_of(purpose) * 2)
    for node in ast.walk(tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            words.update(words_of(node.name) * 2 + words_of(ast.get_docstring(node) or ""))
    outside -= {"__future__"}
    inner = tuple(sorted(imports - {path}))
    return Source(path, purpose, symbols, inner, tuple(sorted(outside)), words, text, tree)


def _imported(tree: ast.Module, path: str) -> Iterator[str]:
    """Dotted names of what a file imports, at its top or within a function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = list(PurePosixPath(path).parent.parts[1:])  # for `from . import`
            base = [*above[: len(above) - node.level + 1], node.module or ""] if node.level else [node.module]
            yield from (".".join([*filter(None, base), alias.name]) for alias in node.names)


def _file_of(name: str, known: set[str]) -> str | None:
    """The project's file that a dotted name lies in: a module, or the module that defines the name."""
    parts = name.split(".")
    for length in (len(parts), len(parts) - 1):
        stem = "/".join(parts[:length])
        for root in IMPORT_ROOTS if stem else ():
            for found in (f"{root}/{stem}.py", f"{root}/{stem}/__init__.py"):
                if found.removeprefix("./") in known:
                    return found.removeprefix("./")
    return None


def _symbols(tree: ast.Module, text: str) -> Iterator[Symbol]:
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield _symbol("function", node, f"{node.name}({_arguments(node.args)})")
        elif isinstance(node, ast.ClassDef):
            bases = ", ".join(ast.unparse(base) for base in node.bases)
            yield _symbol("class", node, node.name + (f"({bases})" if bases else ""))
            for inner in node.body:
                public = isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef)) and inner.name[0] != "_"
                if public:
                    yield _symbol("method", inner, f".{inner.name}({_arguments(inner.args)})")
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]
            plain = all(isinstance(target, (ast.Name, ast.Tuple)) for target in targets)
            for name in names if plain else ():
                if name != "__all__":
                    yield Symbol("constant", name, name, node.lineno, "")


def _symbol(kind: str, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, signature: str) -> Symbol:
    return Symbol(kind, node.name, signature, node.lineno, first_sentence(ast.get_docstring(node) or ""))


def _arguments(args: ast.arguments) -> str:
    """Names alone: types and defaults are in the file below."""
    names = [arg.arg for arg in (*args.posonlyargs, *args.args)]
    if args.vararg or args.kwonlyargs:
        names.append(f"*{args.vararg.arg if args.vararg else ''}")
    names += [arg.arg for arg in args.kwonlyargs]
    names += [f"**{args.kwarg.arg}"] if args.kwarg else []
    return ", ".join(name for name in names if name not in ("self", "cls"))


def first_sentence(text: str) -> str:
    paragraph = " ".join(text.strip().split("\n\n")[0].split())
    return re.split(r"(?<=[.!?]) (?=[A-Z`])", paragraph)[0].removesuffix("::")


def words_of(text: str) -> list[str]:
    """Words in prose and in names: `ShardedRows.full_tensor` has sharded, rows, full and tensor."""
    parts = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+", text)
    return [
        word for part in parts if len(word := part.lower()) > 2 and word not in COMMON and word[0].isalpha()
    ]


@dataclass(frozen=True)
class Index:
    """What is known only of all files together."""

    sources: list[Source]

    @cached_property
    def by_path(self) -> dict[str, Source]:
        return {source.path: source for source in self.sources}

    @cached_property
    def importers(self) -> dict[str, list[str]]:
        found = defaultdict(list)
        for source in self.sources:
            for path in source.imports:
                found[path].append(source.path)
        return found

    def tests_of(self, path: str) -> list[str]:
        """By mirrored path, `src/shardwise/a/b.py` in `tests/a/**/test_*b*.py`; else those that import it."""
        if not path.startswith("src/"):
            return []
        inner = PurePosixPath(path).relative_to("src/shardwise")
        stem = inner.parent.name if inner.stem == "__init__" else inner.stem.strip("_")
        folder = PurePosixPath("tests") / inner.parent
        tests = [
            source.path for source in self.sources if PurePosixPath(source.path).name.startswith("test_")
        ]
        named = [
            t for t in tests if t.startswith(f"{folder}/") and stem in PurePosixPath(t).stem.split("test_")[1]
        ]
        return named + [t for t in self.importers[path] if t in tests and t not in named]

    @cached_property
    def rarity(self) -> dict[str, float]:
        """Of each word: how much it says that a file has it."""
        having = Counter(word for source in self.sources for word in source.words)
        return {word: math.log(len(self.sources) / count) for word, count in having.items()}

    def keywords(self, source: Source) -> list[str]:
        return self._best(source.words, KEYWORDS)

    def folder_keywords(self, folder: str) -> list[str]:
        inside = [source.words for source in self.sources if source.path.startswith(f"{folder}/")]
        return self._best(sum(inside, Counter()), FOLDER_KEYWORDS)

    def _best(self, words: Counter[str], count: int) -> list[str]:
        """Words by how often they stand here and how seldom elsewhere; singular or plural, not both."""
        ranked = sorted(words, key=lambda word: (-math.sqrt(words[word]) * self.rarity[word], word))
        kept: list[str] = []
        for word in ranked:
            if not any(word in (other + "s", other[:-1]) for other in kept):
                kept.append(word)
        return sorted(kept[:count])

    @cached_property
    def folders(self) -> list[str]:
        inside = {str(parent) for source in self.sources for parent in PurePosixPath(source.path).parents}
        return sorted(inside - {"."})


def pages(index: Index) -> Iterator[tuple[str, str]]:
    """(path within the site, Markdown) of every page about the source."""
    yield "source/index.md", _root_page(index)
    yield "source/keywords.md", _keyword_page(index)
    for folder in index.folders:
        yield f"source/{folder}/index.md", _folder_page(index, folder)
    for source in index.sources:
        yield source.page, _file_page(index, source)


def link(path: str, *, page: str, shown: str | None = None) -> str:
    """A Markdown link from a page to that of a file or folder."""
    to = f"source/{path}.md" if path.endswith(".py") else f"source/{path}/index.md"
    return f"[`{shown or path}`]({relpath(to, PurePosixPath(page).parent)})"


def _crumbs(path: str, page: str) -> str:
    """The folders that a file or folder lies in, each a link."""
    parents = [str(parent) for parent in PurePosixPath(path).parents][::-1][1:]
    root = f"[source]({relpath('source/index.md', PurePosixPath(page).parent)})"
    return " / ".join([root, *(link(p, page=page, shown=PurePosixPath(p).name) for p in parents)])


def _listed(title: str, paths: list[str], page: str) -> list[str]:
    if not paths:
        return []
    return [f"## {title}", "", *(f"- {link(path, page=page)}" for path in paths), ""]


def _file_page(index: Index, source: Source) -> str:
    page, shown = source.page, source.path.startswith(SHOWN)
    tests = index.tests_of(source.path)
    importers = [path for path in index.importers[source.path] if path not in tests]
    lines = [f"# {PurePosixPath(source.path).name}", "", _crumbs(source.path, page), ""]
    lines += [prose(source.purpose) or "No description.", ""]
    lines += [f"**Keywords:** {', '.join(index.keywords(source)) or 'none'}", ""]
    if source.symbols:
        lines += ["## Symbols", "", "| | name | line | |", "|---|---|--:|---|"]
        for one in source.symbols:
            at = f"[{one.line}](#__codelineno-0-{one.line})" if shown else str(one.line)
            lines.append(f"| {one.kind} | `{one.signature}` | {at} | {cell(one.about)} |")
        lines.append("")
    lines += _listed("Imports", list(source.imports), page)
    if source.outside:
        lines += [f"From outside: {', '.join(f'`{name}`' for name in source.outside)}.", ""]
    lines += _listed("Imported by", importers, page)
    mirror = next((p for p in _mirrors(source.path) if p in index.folders), None)
    lines += _listed("Tests", tests or [mirror] if mirror else tests, page)
    if shown:
        fence = "```" if "```" not in source.text else "````"
        lines += ["## Text { data-search-exclude }", "", f'{fence}python linenums="1"', source.text.rstrip()]
        lines += [fence, ""]
    return "\n".join(lines)


def _mirrors(path: str) -> list[str]:
    """Folders of tests that mirror those a source file lies in, the nearest first."""
    inner = path.removeprefix("src/shardwise/")
    return (
        [] if inner == path else [f"tests/{one}" for one in PurePosixPath(inner).parents if str(one) != "."]
    )


def _folder_page(index: Index, folder: str) -> str:
    page = f"source/{folder}/index.md"
    inside = [source for source in index.sources if source.folder == folder]
    below = [one for one in index.folders if str(PurePosixPath(one).parent) == folder]
    own = index.by_path.get(f"{folder}/__init__.py")
    lines = [f"# {folder}/", "", _crumbs(folder, page), ""]
    lines += [prose(own.purpose), ""] if own else []
    lines += [f"**Keywords:** {', '.join(index.folder_keywords(folder))}", ""]
    if below:
        lines += ["| folder | keywords |", "|---|---|"]
        for one in below:
            name = link(one, page=page, shown=f"{PurePosixPath(one).name}/")
            lines.append(f"| {name} | {', '.join(index.folder_keywords(one)[:KEYWORDS])} |")
        lines.append("")
    if inside:
        lines += ["| file | purpose | keywords |", "|---|---|---|"]
        for source in inside:
            name = link(source.path, page=page, shown=PurePosixPath(source.path).name)
            lines.append(f"| {name} | {cell(source.headline)} | {', '.join(index.keywords(source))} |")
        lines.append("")
    return "\n".join(lines)


def _root_page(index: Index) -> str:
    page = "source/index.md"
    lines = [
        "# Source files",
        "",
        f"A page for each of {len(index.sources)} files, made from the code: what it",
    ]
    lines += ["decides, its symbols, what it imports, who imports it, and its tests.", ""]
    lines += ["Find a file by a word: [keywords](keywords.md).", "", "| folder | keywords |", "|---|---|"]
    for folder in index.folders:
        if folder.count("/") < 3 and not folder.startswith("tests/"):
            lines.append(f"| {link(folder, page=page)} | {', '.join(index.folder_keywords(folder))} |")
    return "\n".join([*lines, ""])


def _keyword_page(index: Index) -> str:
    """Files of the package by keyword; the tests' words would hide them."""
    page, found = "source/keywords.md", defaultdict(list)
    for source in index.sources:
        if not source.path.startswith("tests/"):
            for word in index.keywords(source):
                found[word].append(source.path)
    lines = ["# Keywords", "", "Words that tell a file from the others, and the files they tell.", ""]
    letter = ""
    for word in sorted(found):
        if word[0] != letter:
            letter = word[0]
            lines += ["", f"## {letter.upper()}", ""]
        files = (link(path, page=page, shown=path.removeprefix("src/shardwise/")) for path in found[word])
        lines.append(f"- **{word}**: {', '.join(files)}")
    return "\n".join([*lines, ""])


def prose(docstring: str) -> str:
    """A docstring as Markdown: `::` before an indented drawing is a colon."""
    return re.sub(r"::$", ":", docstring, flags=re.MULTILINE)


def cell(text: str) -> str:
    """Text within a table."""
    return text.replace("|", r"\|")
