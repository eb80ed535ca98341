"""Builds the model that a case describes.

Every block maps [rows, width] to [rows, width], so any block can be left out of a case and what is left
is still a model. A block is a mapping: `kind` says what it computes, other keys change how: see
`Block` for both. Keys that are absent mean nothing special.
"""

from __future__ import annotations

import time
from collections import UserDict
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WORDS = 11
Spec = dict[str, Any]


class Planned(RuntimeError):  # noqa: N818 - not an error of anything tested
    """What a case asked a block to raise."""


@dataclass
class Control:
    """What a training step asks of blocks, shared by all blocks of a model."""

    rank: int = 0
    # {"block": index, "where": "forward", "backward" (of its output), "autograd" (of its input) or "hook"}
    raises: Spec = field(default_factory=dict)
    delay: Spec = field(default_factory=dict)  # {"block": index, "rank": rank, "ms": how long}

    def at(self, index: int | None) -> None:
        if index is None:
            return
        delay = self.delay
        if delay and delay.get("block", 0) == index and delay.get("rank", 0) == self.rank:
            time.sleep(delay.get("ms", 0) / 1000)
        if self.raises.get("block") == index and self.raises.get("where") == "forward":
            raise Planned(f"block {index}")

    def marks(self, index: int | None, output: Tensor) -> None:
        here = index is not None and self.raises.get("block") == index
        if here and self.raises.get("where") == "backward" and output.requires_grad:
            output.register_hook(planned)

    def through(self, index: int | None, x: Tensor) -> Tensor:
        here = index is not None and self.raises.get("block") == index
        return Raising.apply(x) if here and self.raises.get("where") == "autograd" else x


def planned(_: Tensor) -> Tensor:
    raise Planned("in backward")


class Raising(torch.autograd.Function):
    """A user's own, with a mistake in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return planned(grads[0])


@dataclass
class Pair:
    """An output as a dataclass, which torch's own tree functions do not open."""

    main: Tensor
    side: Tensor


class Holder:
    """An output that nothing knows how to open."""

    def __init__(self, main: Tensor) -> None:
        self.main = main


class Block(nn.Module):
    """One block of a case.

    `out` is the form of what it returns; `inside` checkpoints its body. `frozen` freezes "all" or "bias".
    """

    def __init__(
        self, spec: Spec, width: int, control: Control, *, index: int | None, earlier: list[nn.Module]
    ) -> None:
        super().__init__()
        self.spec, self.width, self.index = spec, width, index
        self.__dict__["control"] = control
        self.kind = spec.get("kind", "linear")
        self.first_dtype: torch.dtype | None = None
        self.kept: Tensor | None = None
        build = getattr(self, f"build_{self.kind}")
        build(earlier)
        for name, param in self.named_parameters():
            if spec.get("frozen") == "all" or (spec.get("frozen") == "bias" and name.endswith("bias")):
                param.requires_grad_(False)
        if "dtype" in spec and self.kind not in ("again", "tied", "nest"):
            self.to(getattr(torch, spec["dtype"]))

    # ---------------------------------------------------------------- kinds

    def build_linear(self, _: list[nn.Module]) -> None:
        self.linear = nn.Linear(self.width, self.width, bias=self.spec.get("bias", True))

    def run_linear(self, x: Tensor, tokens: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))

    def build_mlp(self, _: list[nn.Module]) -> None:
        hidden = self.spec.get("hidden", 3)
        self.up, self.down = nn.Linear(self.width, hidden), nn.Linear(hidden, self.width)

    def run_mlp(self, x: Tensor, tokens: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))

    def build_norm(self, _: list[nn.Module]) -> None:
        which = self.spec.get("which", "layer")
        if which == "layer":
            self.norm: nn.Module = nn.LayerNorm(self.width)
        elif which == "rms":
            self.norm = nn.RMSNorm(self.width, eps=1e-3)
        else:
            self.norm = nn.GroupNorm(1, self.width)
        for param in self.norm.parameters():
            nn.init.normal_(param, 1.0, 0.1)

    def run_norm(self, x: Tensor, tokens: Tensor) -> Tensor:
        if self.width == 1:  # the norm of one number is its sign, or nothing
            return x * self.norm.weight
        return self.norm(x)

    def build_conv(self, _: list[nn.Module]) -> None:
        self.conv = nn.Conv1d(1, self.spec.get("hidden", 3), 3, padding=1)

    def run_conv(self, x: Tensor, tokens: Tensor) -> Tensor:
        return self.conv(x.unsqueeze(1)).mean(1)

    def build_embedding(self, _: list[nn.Module]) -> None:
        self.table = nn.Embedding(WORDS, self.width)

    def run_embedding(self, x: Tensor, tokens: Tensor) -> Tensor:
        return 0.5 * self.table(tokens)

    def build_scale(self, _: list[nn.Module]) -> None:
        shape = self.spec.get("shape", [1])
        self.scale = nn.Parameter(torch.randn(*shape, self.width) / 4)
        self.register_buffer("shift", torch.linspace(0.5, 1.5, self.width))

    def run_scale(self, x: Tensor, tokens: Tensor) -> Tensor:
        return x * self.scale.flatten(0, -2).sum(0) * self.shift

    def build_experts(self, _: list[nn.Module]) -> None:
        self.experts = nn.ModuleList(
            nn.Linear(self.width, self.width) for _ in range(max(1, self.spec.get("count", 2)))
        )

    def run_experts(self, x: Tensor, tokens: Tensor) -> Tensor:
        use = self.spec.get("use", 0)
        if use == "rank":
            use = self.control.rank
        return self.experts[use % len(self.experts)](x)

    def build_nest(self, _: list[nn.Module]) -> None:
        self.inner = nn.ModuleList(
            Block(one, self.width, self.control, index=None, earlier=[]) for one in self.spec.get("inner", [])
        )

    def run_nest(self, x: Tensor, tokens: Tensor) -> Tensor:
        for block in self.inner:
            x = call(block, x, tokens)
        return x

    def build_tied(self, earlier: list[nn.Module]) -> None:
        """A linear layer whose weight is that of an earlier block's."""
        self.linear = nn.Linear(self.width, self.width)
        other = target(self.spec, earlier)
        if other is not None:
            self.linear.weight = other.linear.weight

    run_tied = run_linear

    def build_again(self, earlier: list[nn.Module]) -> None:
        """An earlier block under a second name."""
        other = earlier[self.spec.get("to", 0) % len(earlier)] if earlier else None
        self.other = other if other is not None and other.kind not in ("again", "tied") else None

    def run_again(self, x: Tensor, tokens: Tensor) -> Tensor:
        return x if self.other is None else call(self.other, x, tokens)

    # ---------------------------------------------------------------- the call

    def forward(self, x: Tensor, tokens: Tensor, notes: Any = None) -> Any:
        self.control.at(self.index)
        x = self.control.through(self.index, x)
        if self.spec.get("break"):
            torch._dynamo.graph_break()
        own = next(self.parameters(recurse=self.kind not in ("again", "nest")), None)
        if own is not None and self.spec.get("each"):
            # Between its uses a sharded expert has its stored dtype or, until backward, its computing one.
            self.first_dtype = self.first_dtype or own.dtype
            x = x.to(self.first_dtype)
        elif own is not None:
            x = x.to(own.dtype)
        body = getattr(self, f"run_{self.kind}")
        if self.spec.get("inside"):
            y = checkpoint(body, x, tokens, use_reentrant=False)
        else:
            y = body(x, tokens)
        y = 0.5 * x + y
        if notes is not None:
            y = noted(notes, y)
        self.control.marks(self.index, y)
        return self.form(x, y)

    def form(self, x: Tensor, y: Tensor) -> Any:
        out = self.spec.get("out", "tensor")
        if out == "tuple":
            return y, y.tanh(), None, 3
        if out == "dict":
            return {"main": y, "more": [y.tanh()]}
        if out == "dataclass":
            return Pair(y, y.tanh())
        if out == "object":
            return Holder(y)
        if out == "attribute":
            self.kept = y
            return y.detach()
        if out == "view":
            return y.view(-1).view(y.shape)
        return y


FORMS = ("tuple", "dict", "dataclass", "object", "attribute", "view")


@dataclass
class Notes:
    last: Tensor | None = None
    items: list[Tensor] = field(default_factory=list)


# What a model may hand to its blocks, for each to read what others wrote, and to write to.
NOTES: dict[str, Any] = {"list": list, "dict": dict, "dataclass": Notes, "object": UserDict}


def noted(notes: Any, y: Tensor) -> Tensor:
    """Write a note of a block's output, and return the output plus a part of the note before."""
    note = y.mean(0)
    if isinstance(notes, list):
        last = notes[-1] if notes else None
        notes.append(note)
    elif isinstance(notes, Notes):
        last, notes.last = notes.last, note
        notes.items.append(note)
    else:
        last = notes.pop("last", None)
        notes["last"] = note
        notes["sum"] = notes["sum"] + note if "sum" in notes else note
    return y if last is None else y + 0.1 * last.to(y.dtype)


def all_notes(notes: Any) -> list[Tensor]:
    if isinstance(notes, Notes):
        return notes.items
    return [*notes] if isinstance(notes, list) else [*notes.values()]


def target(spec: Spec, earlier: list[nn.Module]) -> Any:
    linears = [block for block in earlier if block.kind == "linear" and "dtype" not in block.spec]
    return linears[spec.get("to", 0) % len(linears)] if linears else None


def unpack(block: Any, output: Any) -> Tensor:
    if isinstance(output, tuple):
        return output[0] + 0.1 * output[1]
    if isinstance(output, dict):
        return output["main"] + 0.1 * output["more"][0]
    if isinstance(output, Pair):
        return output.main + 0.1 * output.side
    if isinstance(output, Holder):
        return output.main
    if block.kept is not None:
        output, block.kept = block.kept, None
    if block.spec.get("change"):  # the output in place
        if block.spec.get("out") == "view":
            output = output.mul_(0.9)
        else:
            output = (output * 1.0 if output.is_leaf else output).mul_(0.9)
    return output


def call(block: Any, x: Tensor, tokens: Tensor, notes: Any = None) -> Tensor:
    """The block's output as one tensor, through the checkpointing that its description asks for.

    A checkpointed block gets no `notes`, as it would write them again in backward.
    """

    def once(x: Tensor, tokens: Tensor) -> Tensor:
        more = {} if notes is None or "around" in block.spec else {"notes": notes}
        return unpack(block, block(x, tokens, **more))

    for _ in range(0 if block.spec.get("skip") else block.spec.get("calls", 1)):
        around = block.spec.get("around")
        if around is None:
            x = once(x, tokens)
        else:
            x = checkpoint(once, x, tokens, use_reentrant=around == "reentrant")
    return x


class Model(nn.Module):
    """The blocks of a case in a row, and a projection after them; returns the output and every block's."""

    def __init__(self, case: Spec, control: Control) -> None:
        super().__init__()
        width = case.get("width", 3)
        self.blocks = nn.ModuleList()
        for index, spec in enumerate(case.get("blocks", [])):
            self.blocks.append(Block(spec, width, control, index=index, earlier=list(self.blocks)))
        self.head = nn.Linear(width, 3) if case.get("root") is not None else None
        self.out = case.get("out", "tuple")
        self.notes = NOTES.get(case.get("notes", ""))
        self.order = range(len(self.blocks))
        if case.get("backwards"):
            self.order = self.order[::-1]

    def forward(self, x: Tensor, tokens: Tensor) -> Any:
        taps, notes = [], None if self.notes is None else self.notes()
        for index in self.order:
            x = call(self.blocks[index], x, tokens, notes)
            taps.append(x)
        for note in [] if notes is None else all_notes(notes):
            x = x + 0.1 * note.to(x.dtype)
        if self.head is not None:
            x = self.head(x.to(self.head.weight.dtype))
        return {"out": x, "taps": taps} if self.out == "dict" else (x, taps)


def build(case: Spec, control: Control) -> Model:
    torch.manual_seed(case.get("seed", 0))
    return Model(case, control)


def batch(case: Spec, rank: int, number: int) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, tokens and targets of one rank's micro-batch."""
    generator = torch.Generator().manual_seed(1000 * rank + number)
    rows = case.get("rows", 2)
    x = torch.randn(rows, case.get("width", 3), generator=generator, dtype=torch.float64)
    tokens = torch.randint(0, WORDS, (rows,), generator=generator)
    return x, tokens, torch.randn(rows, 1, generator=generator, dtype=torch.float64)


def loss_of(case: Spec, step: Spec, output: Any, targets: Tensor) -> list[Tensor]:
    """The losses that a step goes backward from, in order."""
    out, taps = (output["out"], output["taps"]) if isinstance(output, dict) else output
    wanted = step.get("backward", "whole")
    tap = taps[step.get("tap", 0) % len(taps)] if taps else out
    whole, part = (squared(one, targets) for one in (out, tap))
    return {"whole": [whole], "tap": [part], "two": [part, whole], "sum": [part + whole]}[wanted]


def squared(out: Tensor, targets: Tensor) -> Tensor:
    wide = out if out.dtype is torch.float64 else out.float()
    return (wide - targets.to(wide.dtype)).square().mean()
