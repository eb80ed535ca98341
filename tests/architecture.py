"""The shape of the package, read from its source: who imports whom, what stays private, how long.

Each rule is a function from one parsed file to its violations, as "module:line: what is wrong". It
is applied to every file under src/shardwise, and to a made-up file that breaks it.
"""

from __future__ import annotations

import ast
import graphlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1] / "src" / "shardwise"

# A package imports only from those before it.
ORDER = [
    "_compat",
    "torch_version",
    "errors",
    "launch",
    "files",
    "mesh",
    "layout",
    "comm",
    "dimensions",
    "sharded_tensor",
    "fsdp",
    "nn",
    "optim",
    "graph",
    "checkpoint",
    "tensor_parallel",
    "adapters",
    "hf",
    "planner",
    "verify",
    "doctor",
    "cli",
    "__main__",
    "run",
]
VAGUE = re.compile("one|what|how|where|who|whose|mine|theirs|ours|wanted|told|shown|begun|alike")
FORBIDDEN = [
    "torch.distributed.fsdp",
    "torch.distributed._composable",
    "torch.distributed._shard",
    "torch.distributed._tools",
    "torch.distributed.tensor.experimental",
]
OBJECTS = re.compile(r"_object(_list)?$")
GATHERS_OBJECTS = re.compile(r"(^|\.)(all_gather|gather|broadcast|scatter)_object(_list)?$")
UNPICKLING = {  # also by way of what they call
    "pickle.load",
    "pickle.loads",
    "pickle.Unpickler",
    "torch.distributed.checkpoint.load",
    "torch.distributed.checkpoint.save",
    "torch.distributed.checkpoint.state_dict_loader",
    "torch.distributed.checkpoint.state_dict_saver",
}
KINDS = ("DTensor", "ShardedParameter", "ShardedRows", "ShardedTensor", "ShardedTensorBase")
MAX_FILE_LINES, MAX_FUNCTION_LINES = 500, 120


@dataclass(frozen=True)
class Source:
    module: str  # dotted, without a trailing __init__
    is_package: bool
    text: str
    tree: ast.Module


def source(module: str, text: str, *, is_package: bool = False) -> Source:
    return Source(module, is_package, text, ast.parse(text))


@cache
def every_source() -> list[Source]:
    sources = []
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        sources.append(source(name, path.read_text(), is_package=is_package))
    return sources


# ---------------------------------------------------------------- what a file names


@cache
def nodes(file: Source) -> list[ast.AST]:
    return list(ast.walk(file.tree))


@cache
def imports(file: Source) -> list[tuple[int, str]]:
    """(line, dotted name) of everything imported, wherever the import stands."""
    found = []
    for node in nodes(file):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [(node.lineno, f"{origin(file, node)}.{alias.name}") for alias in node.names]
    return found


def origin(file: Source, node: ast.ImportFrom) -> str:
    """The absolute name of the module an import statement takes from."""
    if node.level == 0:
        return node.module or ""
    above = file.module.split(".")
    above = above[: len(above) - node.level + file.is_package]
    return ".".join([*above, node.module] if node.module else above)


@cache
def torch_names(file: Source) -> list[tuple[int, str]]:
    """(line, dotted name) of every torch name imported, reached by attribute or by getattr("...")."""
    aliases = {}
    for node in nodes(file):
        if isinstance(node, ast.Import):
            for alias in node.names:
                root = alias.name.split(".")[0]
                aliases[alias.asname or root] = alias.name if alias.asname else root
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                aliases[alias.asname or alias.name] = f"{origin(file, node)}.{alias.name}"
    names = [*imports(file)]
    for node in nodes(file):
        if isinstance(node, (ast.Attribute, ast.Call)) and (name := dotted(node, aliases)):
            names.append((node.lineno, name))
    found = {(line, name) for line, name in names if is_within(name, "torch")}
    parts = {(line, name.rpartition(".")[0]) for line, name in found}  # `a.b` within `a.b.c`
    return sorted(found - parts)


def spelled(node: ast.AST) -> str:
    """`dist.all_reduce` as it stands there, and "?" for what is no name, faster than `ast.unparse`."""
    if isinstance(node, ast.Attribute):
        return f"{spelled(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def dotted(node: ast.AST, aliases: dict[str, str]) -> str | None:
    """`dist.fsdp` -> "torch.distributed.fsdp"; None where the chain does not begin with an import."""
    if isinstance(node, ast.Name):
        return aliases.get(node.id)
    if isinstance(node, ast.Attribute):
        base, attribute = node.value, node.attr
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
        base, literal = node.args[:2]
        attribute = str(literal.value) if isinstance(literal, ast.Constant) else "?"
    else:
        return None
    return f"{name}.{attribute}" if (name := dotted(base, aliases)) else None


def is_within(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


def package(name: str) -> str:
    """The package of ORDER that a dotted name lies in; "" for the public names of shardwise itself."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in ORDER else ""


# ---------------------------------------------------------------- the rules

Rule = Callable[[Source], list[str]]


def packages_stand_in_the_order(file: Source) -> list[str]:
    if file.module == "shardwise":
        return []
    name = file.module.split(".")[1]
    return [] if name in ORDER else [f"{file.module}:1: {name} has no place in the order of packages"]


def packages_import_only_from_above(file: Source) -> list[str]:
    if file.module == "shardwise":  # gathers the public names of all
        return []
    mine = file.module.split(".")[1]
    return [
        f"{file.module}:{line}: {mine} imports {name}"
        for line, name in imports(file)
        if is_within(name, "shardwise") and not may_import(mine, package(name))
    ]


def may_import(mine: str, theirs: str) -> bool:
    """Public names are taken from where they are made; only the command line may use shardwise itself."""
    if mine not in ORDER or not theirs:
        return mine == "cli"
    return ORDER.index(theirs) <= ORDER.index(mine)


def layout_knows_no_communication(file: Source) -> list[str]:
    if package(file.module) != "layout":
        return []
    return [
        f"{file.module}:{line}: layout uses {name}"
        for line, name in torch_names(file)
        if is_within(name, "torch.distributed")
    ]


def nothing_imports_the_command_line(file: Source) -> list[str]:
    if package(file.module) in ("cli", "__main__", "run"):
        return []
    return [f"{file.module}:{line}: imports {name}" for line, name in imports(file) if package(name) == "cli"]


def torch_modules_this_library_replaces_are_not_used(file: Source) -> list[str]:
    return [
        f"{file.module}:{line}: uses {name}"
        for line, name in torch_names(file)
        if any(is_within(name, module) for module in FORBIDDEN)
    ]


def private_torch_names_stay_in_compat(file: Source) -> list[str]:
    if package(file.module) == "_compat":
        return []
    return [
        f"{file.module}:{line}: private name {name}"
        for line, name in torch_names(file)
        if any(part.startswith("_") and not part.startswith("__") for part in name.split("."))
    ]


def ranks_and_files_say_text_and_numbers_only(file: Source) -> list[str]:
    """Unpickling runs what a pickle names: whoever can write to a peer or a file could run anything."""
    bad: dict[int, str] = {}
    for line, name in [*imports(file), *torch_names(file)]:
        if is_within(name, "torch.distributed") and OBJECTS.search(name):
            bad[line] = f"{name} unpickles what ranks send"
        elif name in UNPICKLING:
            bad[line] = f"{name} unpickles"
    for node in nodes(file):
        if not isinstance(node, ast.Call):
            continue
        called = spelled(node.func)
        safe = any(k.arg == "weights_only" and ast.unparse(k.value) == "True" for k in node.keywords)
        if called in UNPICKLING or (called == "torch.load" and not safe):
            bad[node.lineno] = f"{called} unpickles"
    return [f"{file.module}:{line}: {why}" for line, why in sorted(bad.items())]


def ranks_compare_in_one_place(file: Source) -> list[str]:
    """What ranks tell each other and find to differ is decided by `comm.agree` (over time, `order`)."""
    if file.module in ("shardwise.comm.agree", "shardwise.comm.order", "shardwise.comm.watch"):
        return []
    bad = [(line, f"imports {name}") for line, name in imports(file) if name.endswith(".gather_text")]
    for node in nodes(file):
        if isinstance(node, ast.Call) and spelled(node.func) == "RankMismatchError":
            bad.append((node.lineno, "raises RankMismatchError by itself"))
        elif isinstance(node, (ast.Attribute, ast.Name)) and GATHERS_OBJECTS.search(spelled(node)):
            bad.append((node.lineno, f"uses {spelled(node)}"))
    return [f"{file.module}:{line}: {why}" for line, why in sorted(bad)]


def safetensors_files_have_one_reader_and_one_writer(file: Source) -> list[str]:
    """`files.tensors` reads, `checkpoint.slices` writes the format itself; neither is done elsewhere."""
    if file.module == "shardwise.files.tensors":
        return []
    found = [(line, name) for line, name in imports(file) if is_within(name, "safetensors")]
    return [f"{file.module}:{line}: imports {name}" for line, name in found]


def kinds_asked_for(file: Source) -> list[int]:
    """Lines that ask which kind of sharded tensor one is, in packages that work with all kinds."""
    if package(file.module) not in ("fsdp", "optim", "checkpoint", "hf"):
        return []
    return [
        node.lineno
        for node in nodes(file)
        if isinstance(node, ast.Call)
        and spelled(node.func) == "isinstance"
        and any(isinstance(part, ast.Name) and part.id in KINDS for part in ast.walk(node.args[1]))
    ]


def files_and_functions_are_short(file: Source) -> list[str]:
    bad = []
    lines = len(file.text.splitlines())
    if lines > MAX_FILE_LINES:
        bad.append(f"{file.module}:{lines}: over {MAX_FILE_LINES} lines")
    for node in nodes(file):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                bad.append(f"{file.module}:{node.lineno}: {node.name} has {length} lines")
    return bad


def names_are_nouns(file: Source) -> list[str]:
    """No argument or local name is a pronoun, question word or participle that could be anything."""
    functions = [node for node in nodes(file) if isinstance(node, (ast.FunctionDef, ast.Lambda))]
    bound = {
        (node.lineno, node.arg if isinstance(node, ast.arg) else node.id)
        for function in functions
        for node in ast.walk(function)
        if isinstance(node, ast.arg) or (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    }
    return [
        f"{file.module}:{line}: name what '{name}' is"
        for line, name in sorted(bound)
        if VAGUE.fullmatch(name)
    ]


RULES: list[Rule] = [
    packages_stand_in_the_order,
    packages_import_only_from_above,
    layout_knows_no_communication,
    nothing_imports_the_command_line,
    torch_modules_this_library_replaces_are_not_used,
    private_torch_names_stay_in_compat,
    ranks_and_files_say_text_and_numbers_only,
    ranks_compare_in_one_place,
    safetensors_files_have_one_reader_and_one_writer,
    files_and_functions_are_short,
    names_are_nouns,
]


def circle(sources: list[Source]) -> list[str]:
    """Modules that import each other in a circle, at the top or within functions; none, mostly.

    A package's front page names its parts and is no part of a circle among them.
    """
    known = {file.module for file in sources if not file.is_package}
    graph = {
        file.module: {
            found
            for _, name in imports(file)
            for found in (name, name.rpartition(".")[0])
            if found in known - {file.module}
        }
        for file in sources
    }
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        found: list[str] = error.args[1]
        return found
    return []
