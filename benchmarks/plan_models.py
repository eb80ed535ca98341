"""Plans of language models of transformers, drawn by name: which are planned, and which refused and why.

    python benchmarks/plan_models.py
    python benchmarks/plan_models.py --models bert t5 mamba

Four of each kind, each with its config class's defaults, so without a network: causal language models,
encoders, encoders with decoders, mixtures of experts, state spaces (and what else goes on from a state).
Each is one `shardwise plan` of 8 H100 that have memory for any of them, so that no changes are planned, in a
process of its own with its imports. It fails where a model is
neither planned nor refused in a line that names what cannot be planned, or takes more than 15 CPU seconds.
"""

import argparse
import os
import random
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from results import Table, machine_facts, write_section

from shardwise import planner

MOST_SECONDS, LIMIT_SECONDS, OF_A_KIND = 15.0, 60, 4
_STATE = ("state_size", "d_state", "linear_num", "linear_attn", "lru_width", "rwkv", "xlstm", "mamba")
_OPERATOR = re.compile(r"\b\w+\.\w+\.\w+\b")


def kinds() -> dict[str, list[str]]:
    """Names of config classes by the kind of model, sorted; those without a default config are left out."""
    import transformers
    from transformers.models.auto import modeling_auto

    tables = [
        getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES")
        for task in ("CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM")
    ]
    found: dict[str, list[str]] = {}
    for name in sorted(set().union(*tables)):
        try:
            config: Any = transformers.CONFIG_MAPPING[name]()
        except Exception as error:  # of transformers' own checks of its defaults
            print(f"{name}: no default config: {type(error).__name__}", file=sys.stderr)
            continue
        text = config if config.is_encoder_decoder else config.get_text_config(decoder=True)
        words = " ".join(key for key, value in text.to_dict().items() if value)
        if config.is_encoder_decoder:
            kind = "encoder with decoder"
        elif any(word in f"{name} {words}" for word in _STATE):
            kind = "state space"
        elif "expert" in words:
            kind = "mixture of experts"
        else:
            kind = "causal" if name in tables[0] and name not in tables[2] else "encoder"
        found.setdefault(kind, []).append(name)
    return found


def planned(name: str, folder: Path) -> tuple[str, str, float]:
    """Plan one: how it ended, what was said of it, CPU seconds."""
    import transformers

    path = folder / f"{name}.json"
    transformers.CONFIG_MAPPING[name]().to_json_file(path, use_diff=False)
    profile = Path(planner.__file__).parent / "hardware" / "h100.toml"
    roomy = folder / "h100.toml"
    roomy.write_text(re.sub(r"(?m)^memory_bytes = .*", f"memory_bytes = {2**50}", profile.read_text()))
    asked = ["plan", str(path), "--ranks", "8", "--sequence", "128", "--hardware", str(roomy)]
    command = [sys.executable, "-W", "ignore", "-m", "shardwise", *asked]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "critical"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, preexec_fn=_limit
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    if done.returncode == 0:
        blocks = re.search(r"[\d,]+ parameters, \d+ blocks", done.stdout)
        return "planned", blocks[0] if blocks else "", seconds
    (*lines, last) = done.stderr.strip().splitlines() or [""]
    last = last.replace(f"{folder}/", "")
    operator = _OPERATOR.search(last.partition(". ")[0])
    is_told = last.startswith("Error: ") and "Traceback" not in " ".join(lines)
    why = operator[0] if operator else last.removeprefix("Error: ").partition(". ")[0]
    return "refused" if is_told else "failed", why, seconds


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_SECONDS, LIMIT_SECONDS))


def rows(asked: Sequence[str], folder: Path) -> Iterator[list[str]]:
    by_kind = kinds()
    draw = random.Random(0)
    drawn = {kind: asked or draw.sample(names, OF_A_KIND) for kind, names in by_kind.items()}
    for kind, names in drawn.items():
        for name in sorted(set(names) & set(by_kind[kind])):
            ended, what, seconds = planned(name, folder)
            yield [name, kind, ended, what, f"{seconds:.1f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=[], help="these, by their model_type, instead")
    parser.add_argument("--write", action="store_true", help="replace the section of TABLES.md")
    options = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for row in rows(options.models, Path(folder)):
            found.append(row)
            print(*row, sep="  ", flush=True)
    title = "Language models of transformers, of their config classes' defaults: a plan of 8 ranks"
    table = Table(title, ["model", "kind", "ended", "what", "CPU s"], found)
    table.show()
    if options.write:
        facts = "; ".join(f"{name} {value}" for name, value in machine_facts().items())
        write_section("plan_models", f"## plan_models\n\n{facts}\n\n{table.markdown()}")
    wrong = [row[0] for row in found if row[2] == "failed" or float(row[4]) > MOST_SECONDS]
    if wrong:
        sys.exit(f"failed, or took more than {MOST_SECONDS:.0f} CPU s: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
