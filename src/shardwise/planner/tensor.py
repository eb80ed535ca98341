"""Tensor parallelism in addition to sharding: how torch's `parallelize_module` is applied to a model.

A model's `tensor_plan` maps names of modules to styles; in a name, `*` matches one part. transformers' models
have plans in the same words. Each word stands for the Python expression of a style (`STYLES`), so the printed
code is what was planned. "sequence" means activations that are cut along their sequence between matmuls, as
in norms and residuals.

transformers' plans leave sequences whole and gather the logits; torchtitan's cut both. `words_of` turns the
first kind into the second, so either can be planned for any model that declares how its matmuls are cut.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, parallel

from shardwise.errors import ShardingError
from shardwise.planner.setup import Setup
from shardwise.planner.shapes import check_divided

_FROM_TOKENS, _TO_SEQUENCE = "input_layouts=Replicate()", "output_layouts=Shard(1)"
STYLES = {
    "colwise": "ColwiseParallel()",
    "rowwise": "RowwiseParallel()",
    "colwise_gather_output": "ColwiseParallel(output_layouts=Replicate())",
    "colwise_rep": "ColwiseParallel(output_layouts=Replicate())",
    "embedding_rowwise": f"RowwiseParallel({_FROM_TOKENS})",
    "replicated_with_grad_allreduce": "SequenceParallel(sequence_dim=2, use_local_output=True)",  # of heads
    "sequence_parallel": "SequenceParallel()",
    "gather_sequence": "PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())",
    "gather_hidden_states": "PrepareModuleInput(input_kwarg_layouts={'hidden_states': Shard(1)},"
    " desired_input_kwarg_layouts={'hidden_states': Replicate()})",  # for a forward called with keywords
    "rowwise_to_sequence": f"RowwiseParallel({_TO_SEQUENCE})",
    "embedding_to_sequence": f"RowwiseParallel({_FROM_TOKENS}, {_TO_SEQUENCE})",
    "part_of_sequence": "PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1))",
    "head_of_sequence": "ColwiseParallel(input_layouts=Shard(1), use_local_output=False)",
    "head_of_sequence_gather_output": "ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())",
    "head_of_loss": "ColwiseParallel(use_local_output=False)",
}
_TO_WHOLE = ("colwise_gather_output", "colwise_rep")
_IN_SEQUENCE = {
    "rowwise": "rowwise_to_sequence",
    "embedding_rowwise": "embedding_to_sequence",
    "whole": "part_of_sequence",
}

ROWS = "rows"  # cut the rows of a head that computes the loss; its inputs and outputs stay as they are
WHOLE = "whole"  # modules that all ranks compute for all tokens, such as learned positions
UNCUT = (ROWS, WHOLE)


def parallelize(module: nn.Module, name: str, mesh: DeviceMesh, setup: Setup) -> None:
    """Cut `module`, of the model `name`, over the axis `mesh`, as `setup` says.

    Raises:
        ShardingError: the model has no plan, or the axis does not divide a size.
    """
    words = words_of(module, setup)
    check_divided(name, sizes_of(module), mesh.size())
    if cuts(module, setup)[0] and setup.length % mesh.size():
        raise ShardingError(
            f"{name}: tensor={mesh.size()} does not divide the {setup.length:,} tokens of a sequence, which"
            " the plan also shards; choose another sequence length, or plan with sequence_parallel=False"
        )
    if counts_positions(module, words):
        module.register_forward_pre_hook(with_positions, with_kwargs=True)
    originals = dict(ties(module))
    names = vars(parallel) | {"Replicate": Replicate, "Shard": Shard}
    styles = {path: eval(STYLES[word], names) for path, word in words.items() if word not in UNCUT}
    parallel.parallelize_module(module, mesh, styles, src_data_rank=None)
    for head in map(module.get_submodule, heads_by_rows(module, words)):
        for key, p in list(head.named_parameters()):
            rows = distribute_tensor(p.detach(), mesh, [Shard(0)], src_data_rank=None)
            setattr(head, key, nn.Parameter(rows))
    for alias, original in originals.items():
        owner, _, attribute = alias.rpartition(".")
        setattr(module.get_submodule(owner), attribute, module.get_parameter(original))


def counts_positions(module: nn.Module, words: dict[str, str]) -> bool:
    """Return whether `module` derives positions from its embedding's output, which this plan cuts."""
    takes = inspect.signature(module.forward).parameters
    return "embedding_to_sequence" in words.values() and "position_ids" in takes


def with_positions(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Pass the positions of all tokens to `module`; a hook that runs before forward."""
    tokens = args[0] if args else kwargs["input_ids"]
    positions = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
    return args, {"position_ids": positions} | kwargs


def sizes_of(module: nn.Module) -> dict[str, int]:
    """Return the sizes that a degree of tensor parallelism must divide, by description."""
    words = styles_of(module)
    config: Any = getattr(module, "config", None) or getattr(module, "shape", None)
    sizes: dict[str, int] = {}
    # Of transformers' configs, and of built-in shapes; an attribute that comes later counts.
    labels = {"heads": ("heads", "num_attention_heads"), "heads of keys": ("kv_heads", "num_key_value_heads")}
    for label, attribute in ((label, name) for label, names in labels.items() for name in names):
        if isinstance(size := getattr(config, attribute, None), int):
            sizes[label] = size
    for path, child in module.named_modules():
        word = next((word for pattern, word in words.items() if _fits(path, pattern)), "")
        if isinstance(child, nn.Linear) and word not in ("colwise_gather_output", "head_of_sequence", ROWS):
            if "colwise" in word:
                sizes[f"outputs of {path}"] = child.out_features
            elif "rowwise" in word:
                sizes[f"inputs of {path}"] = child.in_features
    return sizes


def plan_of(module: nn.Module) -> dict[str, str]:
    """Return a module's own tensor-parallel plan.

    Raises:
        ShardingError: a `tensor_plan` that does not map text to text.
    """
    plan: Any = getattr(module, "tensor_plan", None)
    if not plan:
        return dict(getattr(module, "_tp_plan", None) or {})
    kind = type(module).__name__
    if not isinstance(plan, Mapping) or not all(isinstance(s, str) for pair in plan.items() for s in pair):
        raise ShardingError(
            f"the tensor_plan of {kind} must map names of modules to styles, such as"
            f' {{"blocks.*.up": "colwise"}}, got {plan!r}; styles are {", ".join(STYLES)}'
        )
    return dict(plan)


def check_names(module: nn.Module, *, stages: int = 1) -> None:
    """Check the `tensor_plan` of a model, with all its blocks.

    Raises:
        ShardingError: a name of no module, or of some blocks, which the stages of a pipeline number anew; a
            style that does not suit the module.
    """
    plan = plan_of(module) if getattr(module, "tensor_plan", None) else {}
    names = [name for name, _ in module.named_modules()]
    if wrong := [pattern for pattern in plan if not any(_fits(name, pattern) for name in names)]:
        with_parameters = [
            name for name, m in module.named_modules() if name and next(m.parameters(False), None) is not None
        ]
        known = list(dict.fromkeys(_of_any_block(module, name) for name in with_parameters))
        known = [*known[:20], "..."] if len(known) > 20 else known
        raise ShardingError(
            f"the tensor_plan of {type(module).__name__} has names that match no module:"
            f" {', '.join(map(repr, wrong))}; modules with parameters are {', '.join(known)}"
        )
    tables = [child.num_embeddings for child in module.modules() if isinstance(child, nn.Embedding)]
    outside = [child for name, child in module.named_modules() if "*" not in _of_any_block(module, name)]
    heads = [child for child in outside if getattr(child, "out_features", None) in tables][-1:]
    for (name, child), (pattern, word) in itertools.product(module.named_modules(), plan.items()):
        if "wiseParallel" not in STYLES.get(word, "") or not _fits(name, pattern):
            continue
        expected = ""
        if not isinstance(child, (nn.Linear, nn.Embedding)):
            expected = "expected nn.Linear or nn.Embedding; name those in it, or leave it whole"
        elif word == "rowwise" and isinstance(child, nn.Embedding):
            expected = "whose inputs, tokens, are not cut; give it embedding_rowwise"
        elif word == "colwise" and child in heads:
            expected = "as wide as the vocabulary: the loss needs its logits whole; give it colwise_rep"
        if expected:
            raise ShardingError(
                f"the tensor_plan of {type(module).__name__} has {pattern!r}: {word!r}, but {name!r} is of"
                f" class {type(child).__name__}, {expected}"
            )
    single = [pattern for pattern in plan for name in names if _names_a_block(module, name, pattern)]
    if stages > 1 and single:
        raise ShardingError(
            f"the tensor_plan of {type(module).__name__} names a single block ({single[0]!r}), but each of"
            f" {stages} stages numbers its own; name all blocks by *, or plan with pipeline=1"
        )


def _names_a_block(module: nn.Module, name: str, pattern: str) -> bool:
    parts = _of_any_block(module, name).split(".") if _fits(name, pattern) else []
    return "*" in parts and pattern.split(".")[parts.index("*")] != "*"


def _of_any_block(module: nn.Module, path: str) -> str:
    """Return the pattern of the same module in all blocks, or other items of a `ModuleList`."""
    parts = path.split(".")
    parents = [module.get_submodule(".".join(parts[:depth])) for depth in range(len(parts))]
    pairs = zip(parts, parents, strict=True)
    return ".".join("*" if isinstance(parent, nn.ModuleList) else part for part, parent in pairs)


def words_by_module(module: nn.Module) -> dict[int, list[str]]:
    """Return the words of the module's own plan by the id of what they are for."""
    plan = plan_of(module).items()
    return {
        id(child): [word for pattern, word in plan if _fits(path, pattern)]
        for path, child in module.named_modules()
    }


def styles_of(module: nn.Module) -> dict[str, str]:
    """Return words of `STYLES` by module; an embedding tied to a head is cut with it.

    Raises:
        ShardingError: the model has no plan, or an unknown word.
    """
    if not (plan := plan_of(module)):
        raise ShardingError(
            f"{type(module).__name__} has no plan for tensor parallelism: give it an attribute tensor_plan,"
            ' such as {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}, or plan with tensor=1'
        )
    unknown = [f"{word!r} for {pattern!r}" for pattern, word in plan.items() if word not in (*STYLES, *UNCUT)]
    if unknown:
        raise ShardingError(
            f"{type(module).__name__} has unknown styles in its tensor-parallel plan: {', '.join(unknown)};"
            f" known are {', '.join(STYLES)}. Plan with tensor=1"
        )
    names = [path for path, _ in module.named_modules()]
    words = {pattern: word for pattern, word in plan.items() if any(_fits(path, pattern) for path in names)}
    for alias, original in ties(module):
        head, table = alias.rpartition(".")[0], original.rpartition(".")[0]
        if isinstance(module.get_submodule(table), nn.Embedding) and head in words and table not in words:
            words = {table: "embedding_rowwise", **words}
    return words


def cuts(module: nn.Module, setup: Setup) -> tuple[bool, bool]:
    """Return whether the sequence is cut between matmuls, and whether logits are, up to the loss.

    Raises:
        ShardingError: `setup.loss_parallel`, without a head in the module's plan.
    """
    preferred: str = getattr(module, "auto_tensor_plan", "transformers")
    torchtitan = (preferred if setup.tensor_plan == "auto" else setup.tensor_plan) == "torchtitan"
    sequence, loss = setup.sequence_parallel, setup.loss_parallel
    heads = [path for path, word in plan_of(module).items() if word in (*_TO_WHOLE, ROWS)]
    if loss and not heads:
        raise ShardingError(
            f"{type(module).__name__} cannot be planned with loss parallelism: its tensor-parallel plan has"
            " no head of the style colwise_rep. Give it that, or plan with loss_parallel=False"
        )
    loss = torchtitan and bool(heads) if loss is None else loss
    return torchtitan if sequence is None else sequence, loss


def words_of(module: nn.Module, setup: Setup) -> dict[str, str]:
    """Return `styles_of` the module, with the sequence and the logits cut as `setup` says."""
    words = styles_of(module)
    sequence, loss = cuts(module, setup)
    if not sequence:
        return {key: "head_of_loss" if loss and word in _TO_WHOLE else word for key, word in words.items()}
    head = "head_of_sequence" if loss else "head_of_sequence_gather_output"
    cut = {key: head if word in _TO_WHOLE else _IN_SEQUENCE.get(word, word) for key, word in words.items()}
    takes_tokens = setup.pipeline == 1 or any(isinstance(child, nn.Embedding) for child in module.modules())
    if takes_tokens and "embedding_to_sequence" not in cut.values():
        raise ShardingError(
            f"{type(module).__name__} cannot be planned with sequence parallelism: its tensor-parallel plan"
            " does not shard its embedding. Give that the style embedding_rowwise, or plan with"
            " sequence_parallel=False"
        )
    parents = {key.rpartition(".")[0] for key, word in words.items() if word == "colwise"}
    planned = {
        _of_any_block(module, path)
        for path, _ in module.named_modules()
        if any(_fits(path, key) for key in words)
    }
    for path, child in module.named_modules():
        if gathering := [parent for parent in parents if _fits(path, parent)]:
            takes = [*inspect.signature(child.forward).parameters]
            by_keyword = takes[0] == "hidden_states" and len(takes) > 1
            cut.setdefault(gathering[0], "gather_hidden_states" if by_keyword else "gather_sequence")
        elif next(child.parameters(recurse=False), None) is not None and not any(
            _fits(path, key) for key in cut
        ):
            if (pattern := _of_any_block(module, path)) in planned:
                raise ShardingError(
                    f"{type(module).__name__} cannot be planned with sequence parallelism: its"
                    f" tensor-parallel plan has {pattern}, not {path!r}. Cut all blocks alike, or plan with"
                    " sequence_parallel=False"
                )
            cut[pattern] = "sequence_parallel"
    return cut


def heads_by_rows(module: nn.Module, words: dict[str, str]) -> list[str]:
    """Return heads whose rows are cut, except those tied to an embedding."""
    tied_heads = {name.rpartition(".")[0] for name, _ in ties(module)}
    return [name for name, word in words.items() if word == ROWS and name not in tied_heads]


def ties(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield names of parameters that are tied to earlier ones, with the earlier names."""
    first: dict[int, str] = {}
    for name, p in module.named_parameters(remove_duplicate=False):
        if first.setdefault(id(p), name) != name:
            yield name, first[id(p)]


def _fits(name: str, pattern: str) -> bool:
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatch, parts, patterns))
