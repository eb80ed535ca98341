"""Checkpoints as someone might make them who wants a load to go wrong; digests fit where asked for."""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from shardwise.checkpoint import commit
from shardwise.files.manifest import digest


def read_manifest(folder: Path) -> dict[str, Any]:
    """As it is, of whatever content."""
    manifest: dict[str, Any] = json.loads((folder / commit.MANIFEST).read_text())
    del manifest["sha256"]
    return manifest


def refit(folder: Path, manifest: dict[str, Any]) -> None:
    """Write `manifest` with digests that fit the files there are."""
    if isinstance(manifest.get("files"), dict):
        for name, entry in manifest["files"].items():
            file = folder / name
            if isinstance(entry, dict) and file.is_file():
                manifest["files"][name] = digest(file)
    own = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    (folder / commit.MANIFEST).write_text(json.dumps({**manifest, "sha256": own}))


def change_manifest(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    manifest = read_manifest(folder)
    change(manifest)
    refit(folder, manifest)


def change_index(folder: Path, change: Callable[[Any], Any]) -> None:
    index = pickle.loads((folder / ".metadata").read_bytes())
    change(index)
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    refit(folder, read_manifest(folder))


# Random damage


def damage(folder: Path, random: Random) -> str:
    """Change something in a folder of files; says what."""
    files = sorted(file for file in folder.iterdir() if file.is_file())
    file = random.choice(files)
    kinds: list[Callable[[Path, Random], str]] = [_flip, _truncate, _swap, _remove, _insert]
    if file.suffix == ".json":
        kinds += [_retype] * 4
    told = f"{file.name}: {random.choice(kinds)(file, random)}"
    if (folder / commit.MANIFEST).is_file() and random.random() < 0.8:
        try:
            refit(folder, read_manifest(folder))
        except Exception:  # no manifest any more
            return told
        return f"{told}, digests fit"
    return told


def _flip(file: Path, random: Random) -> str:
    content = bytearray(file.read_bytes())
    places = [random.randrange(len(content)) for _ in range(random.choice([1, 1, 8]))] if content else []
    for place in places:
        content[place] ^= 1 << random.randrange(8)
    file.write_bytes(content)
    return f"bits flipped at {places}"


def _truncate(file: Path, random: Random) -> str:
    content = file.read_bytes()
    kept = random.randrange(len(content) + 1)
    file.write_bytes(content[:kept])
    return f"cut to {kept} of {len(content)} bytes"


def _insert(file: Path, random: Random) -> str:
    content, place = file.read_bytes(), random.randrange(file.stat().st_size + 1)
    file.write_bytes(content[:place] + random.randbytes(random.choice([1, 4, 100])) + content[place:])
    return f"bytes inserted at {place}"


def _swap(file: Path, random: Random) -> str:
    other = random.choice(sorted(each for each in file.parent.iterdir() if each.is_file()))
    first, second = file.read_bytes(), other.read_bytes()
    file.write_bytes(second)
    other.write_bytes(first)
    return f"swapped with {other.name}"


def _remove(file: Path, random: Random) -> str:
    file.unlink()
    if random.random() < 0.3:
        file.mkdir()
        return "a folder instead"
    return "removed"


_OTHERS: list[Any] = [None, True, -1, 0, 3, 2**70, 1.5, "x", "../x", "/etc/passwd", [], [1], {}, {"a": 1}]


def _retype(file: Path, random: Random) -> str:
    """Another value somewhere in a JSON file, or one entry less."""
    found = json.loads(file.read_text())
    container: Any = {"": found}
    key: Any = ""
    path = []
    while isinstance(container[key], (dict, list)) and container[key] and random.random() < 0.85:
        container = container[key]
        key = random.choice(list(container) if isinstance(container, dict) else range(len(container)))
        path.append(key)
    if isinstance(container, dict) and len(path) and random.random() < 0.3:
        del container[key]
        told = "removed"
    else:
        container[key] = random.choice(_OTHERS)
        told = f"made {container[key]!r}"
    file.write_text(json.dumps(found if path else container.get("", found)))
    return f"{path} {told}"
