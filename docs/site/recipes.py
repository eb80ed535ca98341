"""Whether what the documentation's recipes say can be run, as far as that is seen without a cluster.

    python docs/site/recipes.py

checks every block of docs/recipes: shell by `bash -n`, and shellcheck where it is installed; lines of
`#SBATCH` by name and form; commands by the parsers of torchrun and of shardwise; Python by compiling it, and
its imports where the package is installed; YAML of a TrainJob by the models of Kubeflow Trainer's API where
they are installed, else by the fields that this file knows; other YAML by Kubernetes's schemas, where
kubernetes-validate is installed. `check_command` serves all pages.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "recipes"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# sbatch's options that recipes use, with the form of their values.
SBATCH = {
    "job-name": r"[\w-]+",
    "nodes": r"\d+(-\d+)?",
    "ntasks-per-node": r"\d+",
    "gpus-per-node": r"(\w+:)?\d+",
    "cpus-per-task": r"\d+",
    "time": r"(\d+-)?\d+:\d\d:\d\d",
    "requeue": None,
    "open-mode": r"append|truncate",
    "signal": r"(B:)?(USR1|USR2|TERM)(@\d+)?",
    "output": r"[\w/%.-]+",
}
# A TrainJob's fields, for where the API's models are not installed.
TRAINJOB = {
    "runtimeRef": {"apiGroup", "kind", "name"},
    "trainer": {"image", "command", "args", "env", "numNodes", "numProcPerNode", "resourcesPerNode"},
    "runtimePatches": {"manager", "time", "trainingRuntimeSpec"},
    "initializer": {"dataset", "model"},
}


def problems(page: Path) -> Iterator[str]:
    """What is wrong with a page's blocks."""
    for language, body in FENCE.findall(page.read_text(encoding="utf-8")):
        checks = {"bash": _shell, "yaml": _yaml, "python": _python, "console": _console}
        if language not in checks and language not in ("text", ""):
            yield f"{page.name}: nothing checks a block of {language!r}"
        for problem in checks.get(language, lambda body: ())(body):
            yield f"{page.name}: {problem}"


def _shell(text: str) -> Iterator[str]:
    found = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True)
    if found.returncode:
        yield found.stderr.strip()
    beside = Path(sys.executable).with_name("shellcheck")
    if checker := str(beside) if beside.exists() else shutil.which("shellcheck"):
        found = subprocess.run([checker, "-s", "bash", "-"], input=text, text=True, capture_output=True)
        if found.returncode:
            yield found.stdout.strip()
    for line in re.findall(r"^#SBATCH (.*)$", text, re.MULTILINE):
        name, _, value = line.removeprefix("--").partition("=")
        if name not in SBATCH or not re.fullmatch(SBATCH[name] or "", value):
            yield f"#SBATCH {line}: not an option of sbatch, or not its form"
    lines = re.sub(r"\\\n\s*", " ", text)
    for command in re.findall(r"^(?:exec |srun --\S+ )?(torchrun .*?)(?: &)?$", lines, re.MULTILINE):
        yield from check_command(re.sub(r'"\$[^"]*"', "1", command))


def _console(text: str) -> Iterator[str]:
    for line in re.findall(r"^\$ (.*)$", text, re.MULTILINE):
        yield from check_command(line)


def check_command(line: str) -> Iterator[str]:
    """What torchrun or shardwise would say of a command line; other programs are not looked at."""
    words = [word for word in shlex.split(line) if not re.fullmatch(r"[A-Z_]+=.*", word)]
    if words[0] == "torchrun":
        yield from _torchrun(words[1:], line)
    elif words[0] == "shardwise":
        yield from _shardwise(words[1:], line)


def _torchrun(words: list[str], line: str) -> Iterator[str]:
    from torch.distributed.run import get_args_parser

    try:
        given = get_args_parser().parse_args(words)
    except SystemExit:
        yield f"{line}: torchrun does not take it"
        return
    if given.module and given.training_script == "shardwise.run":
        yield from _shardwise(["run", *given.training_script_args], line)


def _shardwise(words: list[str], line: str) -> Iterator[str]:
    import typer

    from shardwise.cli import app

    command: Any = typer.main.get_command(app)
    try:
        while hasattr(command, "commands"):
            if not words or words[0].startswith("-"):
                return
            command = command.commands[words[0]]
            words = words[1:]
        command.make_context(command.name, list(words), resilient_parsing=False)
    except KeyError:
        yield f"{line}: shardwise has no command {words[0]!r}"
    except Exception as error:  # click's and typer's errors have no base in common
        yield f"{line}: {error}"


def _python(text: str) -> Iterator[str]:
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and importlib.util.find_spec((node.module or "").split(".")[0]):
            module = importlib.import_module(node.module or "")
            missing = [alias.name for alias in node.names if not hasattr(module, alias.name)]
            if missing:
                yield f"{node.module} has no {missing}"


def _yaml(text: str) -> Iterator[str]:
    for document in yaml.safe_load_all(text):
        if missing := {"apiVersion", "kind", "metadata", "spec"} - set(document):
            yield f"a document without {sorted(missing)}"
        elif document["kind"] == "TrainJob":
            models = importlib.util.find_spec("kubeflow_trainer_api") is not None
            yield from _by_models(document) if models else _by_fields(document)
        elif importlib.util.find_spec("kubernetes_validate") is not None:
            yield from _by_schema(document)


def _by_schema(document: dict[str, Any]) -> Iterator[str]:
    """What Kubernetes's own schemas say of one of its objects."""
    import kubernetes_validate

    try:
        kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)
    except kubernetes_validate.ValidationError as error:
        yield f"{document['kind']}: {error.message}"


def _by_models(document: dict[str, Any]) -> Iterator[str]:
    """What is left of a document in the API's own models: fields that they do not know are gone."""
    from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob

    try:
        known = TrainerV1alpha1TrainJob.from_dict(document)
    except ValueError as error:
        yield f"TrainJob: {error}"
        return
    yield from _lost(document, known.to_dict(), "TrainJob")


def _lost(given: Any, kept: Any, where: str) -> Iterator[str]:
    if isinstance(given, dict):
        for key, value in given.items():
            if not isinstance(kept, dict) or key not in kept:
                yield f"{where} has no field {key!r}"
            else:
                yield from _lost(value, kept[key], f"{where}.{key}")
    elif isinstance(given, list):
        for value, other in zip(given, kept, strict=True):
            yield from _lost(value, other, where)


def _by_fields(document: dict[str, Any]) -> Iterator[str]:
    if document["apiVersion"] != "trainer.kubeflow.org/v1alpha1":
        yield f"a TrainJob of {document['apiVersion']}"
    for part, value in document["spec"].items():
        for one in value if isinstance(value, list) else [value]:
            if unknown := set(one) - TRAINJOB.get(part, set()):
                yield f"TrainJob.spec.{part} has no field {sorted(unknown)}"


def main() -> None:
    pages = sorted(FOLDER.glob("*.md"))
    found = [problem for page in pages for problem in problems(page)]
    print(f"{len(pages)} pages of recipes, {len(found)} problems", *found, sep="\n  ")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
