"""Models to cut over ranks, plans, and what each should cost: `python tests/tensor_parallel/zoo.py --all`.

Every model is exported, cut for every rank and run in lock step in this process, beside the whole model.
Weights are random and all models tiny; those of `transformers` are made from configs, without any network.
"""

from __future__ import annotations

import itertools
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from lockstep import collectives, run
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.utils import _pytree as pytree

from shardwise.tensor_parallel import ColwiseParallel, RowwiseParallel, tensor_parallel_transformation

COL, ROW = ColwiseParallel, RowwiseParallel
Form = tuple[bool, bool]  # strict, decomposed
FORMS: list[Form] = list(itertools.product((False, True), (False, True)))


@dataclass(frozen=True)
class Case:
    """A model and what it should cost.

    Attributes:
        build: the model and its inputs, equal whenever it is called.
        plan: styles by module.
        reduces: how many all-reduces; None for any number.
        gathers: how many all-gathers.
        share: the most that a rank may have of all parameters, on 2 ranks; None for any.
        others: other inputs that the exported program takes too, where sizes are dynamic.
        tolerance: of outputs, relative to the largest.
        warned: are there operations without a rule?
    """

    build: Callable[[], tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]
    plan: dict[str, Any]
    reduces: int | None = None
    gathers: int | None = 0
    share: float | None = None
    dynamic: Any = None
    others: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]] | None = None
    tolerance: float = 1e-10
    warned: bool = False
    strict: bool = True  # can torch.export's strict mode trace it?


@dataclass
class Result:
    """What one case came to on so many ranks."""

    error: float
    counts: dict[str, int]
    share: float
    messages: list[str] = field(default_factory=list)


RANKS = "234"  # how many ranks each case is cut over, by the table
CASES: dict[str, Case] = {}


def export(case: Case, form: Form) -> tuple[ExportedProgram, nn.Module, tuple[Any, ...], dict[str, Any]]:
    """The case's program in this form, its model and inputs."""
    strict, decomposed = form
    model, args, kwargs = case.build()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        program = torch.export.export(model, args, kwargs, dynamic_shapes=case.dynamic, strict=strict)
        return (program.run_decompositions() if decomposed else program), model, args, kwargs


def cut(
    program: ExportedProgram, plan: dict[str, Any], ranks: int
) -> tuple[list[ExportedProgram], list[str]]:
    """Every rank's program, and what was warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        programs = [tensor_parallel_transformation(program, r, ranks, "cpu", plan) for r in range(ranks)]
    return programs, sorted({str(w.message) for w in caught if issubclass(w.category, UserWarning)})


@torch.no_grad()
def measure(case: Case, ranks: int, form: Form, exported: Any = None) -> Result:
    """Cut the case over so many ranks, run them, compare with the whole model."""
    program, model, args, kwargs = exported or export(case, form)
    programs, messages = cut(program, case.plan, ranks)
    total = sum(t.numel() for t in _unique(program))
    share = max(sum(t.numel() for t in _unique(one)) for one in programs) / max(1, total)
    error = 0.0
    inputs = [(args, kwargs)] + ([case.others()] if case.others else [])
    for given, named in inputs:
        expected = [x for x in pytree.tree_leaves(model(*given, **named)) if isinstance(x, Tensor)]
        for results in run(programs, *given, **named):
            found = [x for x in results if isinstance(x, Tensor)]
            assert len(found) == len(expected)
            error = max([error, *(_distance(x, y) for x, y in zip(found, expected, strict=True))])
    return Result(error, collectives(programs[0]), share, messages)


def _unique(program: ExportedProgram) -> list[Tensor]:
    return list(
        {(t.data_ptr(), id(t) if not t.numel() else 0): t for t in program.state_dict.values()}.values()
    )


def _distance(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape, (found.shape, expected.shape)
    assert found.dtype == expected.dtype
    if not expected.numel():
        return 0.0
    one, other = found.double(), expected.double()
    finite = other.isfinite()
    assert torch.equal(one[~finite], other[~finite])
    scale = max(1e-30, float(other[finite].abs().max())) if finite.any() else 1.0
    return float((one[finite] - other[finite]).abs().max()) / scale if finite.any() else 0.0


def problems(case: Case, result: Result, ranks: int) -> list[str]:
    """What is not as it should be, in words."""
    found = []
    if not result.error <= case.tolerance:
        found.append(f"error {result.error:.1e}")
    reduces, gathers = result.counts.get("all_reduce", 0), result.counts.get("all_gather_into_tensor", 0)
    if case.reduces is not None and reduces != case.reduces:
        found.append(f"{reduces} all-reduces, not {case.reduces}")
    if case.gathers is not None and gathers != case.gathers:
        found.append(f"{gathers} all-gathers, not {case.gathers}")
    if ranks == 2 and case.share is not None and result.share > case.share:
        found.append(f"{result.share:.2f} of the parameters, not {case.share}")
    if result.messages and not case.warned:
        found.append("; ".join(result.messages))
    return found


def case(name: str, **known: Any) -> Callable[[Any], Any]:
    """Register the function that builds a model and its inputs (args, or args and kwargs)."""

    def register(build: Callable[[], Any]) -> Any:
        def seeded() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
            torch.manual_seed(0)
            model, args, *kwargs = build()
            return model.eval(), args, (kwargs[0] if kwargs else {})

        CASES[name] = Case(build=seeded, **known)
        return build

    return register


# ------------------------------------------------------------ layers


class Layers(nn.Module):
    """Modules by name, and what is done with them."""

    def __init__(self, forward: Callable[..., Any], **modules: nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)
        self.double()
        self.body = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.body(self, *args, **kwargs)


def values(*sizes: int) -> Tensor:
    return torch.randn(*sizes, dtype=torch.float64)


def _mlp(m: Any, x: Tensor) -> Tensor:
    return m.down(F.gelu(m.up(x)))


@case("mlp", plan={"up": COL, "down": ROW}, reduces=1, share=0.55)
def mlp() -> Any:
    return Layers(_mlp, up=nn.Linear(12, 48), down=nn.Linear(48, 12)), (values(5, 12),)


@case("mlp of 10, 3 and 2 features", plan={"up": COL, "down": ROW, "top": COL, "end": ROW}, reduces=2)
def uneven_mlp() -> Any:
    def body(m: Any, x: Tensor) -> Tensor:
        return m.end(m.top(m.down(F.relu(m.up(x)))).sigmoid())

    layers = {
        "up": nn.Linear(5, 10),
        "down": nn.Linear(10, 3),
        "top": nn.Linear(3, 2),
        "end": nn.Linear(2, 5),
    }
    return Layers(body, **layers), (values(4, 5),)


@case("column only", plan={"up": COL}, reduces=0, gathers=1)
def column_only() -> Any:
    return Layers(lambda m, x: m.up(x).relu(), up=nn.Linear(6, 9)), (values(4, 6),)


@case("row only", plan={"down": ROW}, reduces=1)
def row_only() -> Any:
    return Layers(lambda m, x: m.down(x).relu(), down=nn.Linear(9, 6)), (values(4, 9),)


@case("a layer used twice", plan={"up": COL, "down": ROW}, reduces=2)
def used_twice() -> Any:
    return Layers(lambda m, x: _mlp(m, _mlp(m, x)), up=nn.Linear(6, 8), down=nn.Linear(8, 6)), (values(4, 6),)


@case("terms added", plan={"a": COL, "b": COL, "c": ROW, "d": ROW}, reduces=1)
def terms_added() -> Any:
    def body(m: Any, x: Tensor) -> Tensor:
        return (m.c(m.a(x).tanh()) + m.d(m.b(x).relu())) * 0.5

    a, b = nn.Linear(6, 8), nn.Linear(6, 8)
    c, d = nn.Linear(8, 6, bias=False), nn.Linear(8, 6, bias=False)
    return Layers(body, a=a, b=b, c=c, d=d), (values(4, 6),)


@case("no plan at all", plan={}, reduces=0)
def no_plan() -> Any:
    return mlp()


# ------------------------------------------------------------ operations


@case("a value times itself", plan={"up": COL, "down": ROW}, reduces=1)
def times_itself() -> Any:
    def body(m: Any, x: Tensor) -> Tensor:
        y = m.up(x)
        return m.down(y * y + y)

    return Layers(body, up=nn.Linear(6, 8), down=nn.Linear(8, 6)), (values(4, 6),)


@case("terms times themselves", plan={"down": ROW}, reduces=1)
def terms_times_themselves() -> Any:
    def body(m: Any, x: Tensor) -> Tensor:
        y = m.down(x)
        return y * y

    return Layers(body, down=nn.Linear(8, 6, bias=False)), (values(4, 8),)


@case("parts along the cut dim", plan={"up": COL, "down": ROW}, gathers=None)
def parts() -> Any:
    def body(m: Any, x: Tensor) -> Any:
        y = m.up(x)
        a, b, c = y.split([2, 5, 3], -1)
        d, e = y.chunk(2, -1)
        together = torch.cat([a, b, c, d, e], -1)
        return m.down(together), torch.stack([d, e]), y[:, 1:-2], y[:, ::3], y.select(1, -1), y[..., None, :]

    return Layers(body, up=nn.Linear(6, 10), down=nn.Linear(20, 6)), (values(4, 6),)


@case("reductions", plan={"up": COL}, gathers=None)
def reductions() -> Any:
    def body(m: Any, x: Tensor) -> Any:
        y = m.up(x)
        var, mean = torch.var_mean(y, -1)
        wholes = (y.sum(), y.mean(), y.amax(-1), y.sum(-1, keepdim=True), y.mean((0, 1)), y.max(), y.prod(-1))
        others = (y.sum(0), y.var(1), torch.var_mean(y, 1, keepdim=True), y.max(0), y.norm(dim=0), y.std(1))
        return (
            var,
            mean,
            wholes,
            others,
            torch.topk(y, 2),
            y.argmax(-1),
            y.softmax(-1),
            y.sort(0),
            y.logsumexp(1),
        )

    return Layers(body, up=nn.Linear(6, 10)), (values(4, 3, 6),)


@case("views", plan={"up": COL}, gathers=None)
def views() -> Any:
    def body(m: Any, x: Tensor) -> Any:
        y = m.up(x)
        z = y.view(4, 3, 6, 2).permute(0, 2, 1, 3)
        return (
            z.flatten(1, 2),
            z.reshape(4, 36),
            y.unflatten(-1, (2, 3, 2)),
            y.reshape(-1),
            z.unsqueeze(1).expand(4, 5, 6, 3, 2),
            y.reshape(36, 4),
            y.transpose(1, 2).reshape(4, -1),
            y.repeat(1, 2, 1),
            y.repeat(1, 1, 2),
            y.flip(-1).roll(1, 1),
            y.unbind(1),
        )

    return Layers(body, up=nn.Linear(6, 12)), (values(4, 3, 6),)


@case("indices", plan={"up": COL}, gathers=None)
def indices() -> Any:
    def body(m: Any, x: Tensor, i: Tensor) -> Any:
        y = m.up(x)
        some = torch.index_select(y, 1, i), y[:, i], y[i, i], y[..., i], torch.where(y > 0, y, 0.0)
        return (
            some,
            y.gather(1, i[None, :, None].expand(4, 2, 12)),
            y.masked_fill(y > 0, 0),
            y[:, :, -1],
            y.cumsum(1),
        )

    return Layers(body, up=nn.Linear(6, 12)), (values(4, 3, 6), torch.tensor([2, 0]))


@case("operations without a rule", plan={"up": COL}, gathers=None, warned=True)
def without_rule() -> Any:
    def body(m: Any, x: Tensor) -> Any:
        y = m.up(x)
        return torch.linalg.inv(y[:, :4] + 10 * torch.eye(4, dtype=y.dtype)), torch.cdist(y, y), y.nonzero()

    return Layers(body, up=nn.Linear(6, 10)), (values(4, 6),)


@case("outputs of every kind", plan={"up": COL, "down": ROW}, reduces=1, gathers=1)
def outputs() -> Any:
    def body(m: Any, x: Tensor, *, scale: Tensor, flag: bool = True) -> Any:
        y = m.up(x)
        return {"y": y, "none": None, "pair": (m.down(y * scale), [x]), "number": 3, "size": y.shape[0]}

    return Layers(body, up=nn.Linear(6, 10), down=nn.Linear(10, 2)), (values(4, 6),), {"scale": values(10)}


class _Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("last", torch.zeros(4, 10))
        self.register_buffer("scale", torch.rand(10))
        self.double()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.up(x)
        y.relu_()
        self.calls.add_(1)
        self.last.copy_(y)
        y[:, 2:5] *= 2
        return self.down(y * self.scale), self.last + self.calls


@case("buffers written", plan={"up": COL, "down": ROW}, reduces=1, gathers=2)
def buffers() -> Any:
    return _Counting(), (values(4, 6),)


@case(
    "dynamic rows",
    plan={"up": COL, "down": ROW},
    reduces=1,
    gathers=1,
    dynamic=(((Dim("rows"), Dim("more"), Dim.STATIC),),),
    others=lambda: ((values(7, 2, 6),), {}),
)
def dynamic_rows() -> Any:
    def body(m: Any, x: Tensor) -> Any:
        y = m.up(x)
        return m.down(y.reshape(-1, 10)).reshape(x.shape), y.mean(0), y.shape[1]

    return Layers(lambda m, x: body(m, x), up=nn.Linear(6, 10), down=nn.Linear(10, 6)), (values(4, 3, 6),)


# ------------------------------------------------------------ convolutions


@case("conv net", plan={"a": COL, "b": ROW, "c": COL, "top": ROW}, reduces=2, share=0.6)
def conv_net() -> Any:
    def body(m: Any, x: Tensor) -> Tensor:
        x = F.relu(m.b(F.max_pool2d(F.relu(m.n(m.a(x))), 2)))
        return m.top(F.adaptive_avg_pool2d(m.c(x), 2).flatten(1))

    modules = {
        "a": nn.Conv2d(3, 8, 3, padding=1),
        "n": nn.BatchNorm2d(8),
        "b": nn.Conv2d(8, 5, 3),
        "c": nn.Conv2d(5, 6, 1),
        "top": nn.Linear(24, 4),
    }
    for buffer in modules["n"].buffers():
        if buffer.dtype.is_floating_point:
            buffer.uniform_(0.5, 1.5)
    return Layers(body, **modules), (values(2, 3, 8, 8),)


@case("depthwise conv and norms of groups", plan={"a": COL, "b": ROW}, gathers=None)
def depthwise() -> Any:
    def body(m: Any, x: Tensor) -> Tensor:
        return m.b(m.g(m.d(m.a(x))))

    modules = {
        "a": nn.Conv1d(3, 12, 1),
        "d": nn.Conv1d(12, 24, 3, padding=1, groups=12),
        "g": nn.GroupNorm(6, 24),
        "b": nn.Conv1d(24, 3, 1),
    }
    return Layers(body, **modules), (values(2, 3, 8),)


class _Training(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.n, self.b = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 1)
        self.double()

    def eval(self) -> nn.Module:
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.n(self.a(x)).relu())


@case("batch norm in training", plan={"a": COL, "b": ROW}, reduces=1, gathers=None)
def norm_in_training() -> Any:
    return _Training(), (values(4, 3, 6, 6),)


# ------------------------------------------------------------ transformers of our own


class Block(nn.Module):
    """A transformer layer whose projections are fused in one of several ways."""

    def __init__(
        self, heads: int, *, fused: str = "", key_heads: int = 0, repeat: str = "", width: int = 8
    ) -> None:
        super().__init__()
        self.heads, self.key_heads, self.width = heads, key_heads or heads, width
        self.fused, self.repeat = fused, repeat
        size = heads * width
        if fused:
            self.qkv = nn.Linear(size, (heads + 2 * self.key_heads) * width)
        else:
            self.q = nn.Linear(size, size)
            self.k, self.v = (nn.Linear(size, self.key_heads * width) for _ in range(2))
        self.o, self.norm, self.norm2 = nn.Linear(size, size), nn.LayerNorm(size), nn.LayerNorm(size)
        self.up, self.down = nn.Linear(size, 2 * size), nn.Linear(2 * size, size)
        self.double()

    def project(self, h: Tensor) -> list[Tensor]:
        b, s, _ = h.shape
        n, kv, d = self.heads, self.key_heads, self.width
        if self.fused == "chunk":
            return [t.view(b, s, n, d).transpose(1, 2) for t in self.qkv(h).chunk(3, -1)]
        if self.fused == "parts":
            parts = self.qkv(h).split([n * d, kv * d, kv * d], -1)
            return [t.view(b, s, -1, d).transpose(1, 2) for t in parts]
        if self.fused == "slices":
            y = self.qkv(h)
            parts = y[..., : n * d], y[..., n * d : (n + kv) * d], y[..., (n + kv) * d :]
            return [t.view(b, s, -1, d).transpose(1, 2) for t in parts]
        if self.fused == "3hd":
            return list(self.qkv(h).view(b, s, 3, n, d).permute(2, 0, 3, 1, 4).unbind(0))
        if self.fused == "h3d":
            y = self.qkv(h).view(b, s, n, 3, d)
            return [y[..., i, :].transpose(1, 2) for i in range(3)]
        if self.fused == "heads chunk":
            return list(self.qkv(h).view(b, s, n, 3 * d).transpose(1, 2).chunk(3, -1))
        return [t.view(b, s, -1, d).transpose(1, 2) for t in (self.q(h), self.k(h), self.v(h))]

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group = self.heads // self.key_heads
        if self.repeat == "gqa":
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        if self.repeat == "interleave":
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        elif group > 1:
            b, n, s, d = k.shape
            k, v = (t[:, :, None].expand(b, n, group, s, d).reshape(b, n * group, s, d) for t in (k, v))
        if self.repeat == "by hand":
            weights = q @ k.transpose(-1, -2) / self.width**0.5
            return weights.softmax(-1) @ v
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def forward(self, x: Tensor) -> Tensor:
        b, s, e = x.shape
        y = self.attend(*self.project(self.norm(x)))
        x = x + self.o(y.transpose(1, 2).reshape(b, s, e))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


_BLOCK = {"q": COL, "k": COL, "v": COL, "o": ROW, "up": COL, "down": ROW}
_FUSED = {"qkv": COL, "o": ROW, "up": COL, "down": ROW}


def _block(name: str, heads: int, *, moves: bool = False, dynamic: bool = False, **kind: Any) -> None:
    known: dict[str, Any] = {}
    if dynamic:
        known["dynamic"] = ((Dim("batch"), Dim("sequence"), Dim.STATIC),)
        known["others"] = lambda: ((values(3, 7, heads * 8),), {})
    plan = _FUSED if kind.get("fused") else _BLOCK
    share = 0.56 if not kind.get("key_heads") else 0.7
    case(name, plan=plan, reduces=2, gathers=None if moves else 0, share=share, **known)(
        lambda: (Block(heads, **kind), (values(2, 5, heads * 8),))
    )


_block("block", 4)
_block("block, dynamic", 4, dynamic=True)
_block("block, by hand", 6, repeat="by hand")
_block("block, by hand, dynamic", 6, repeat="by hand", dynamic=True)
_block("block of 6 heads", 6)
_block("block of 6 heads, dynamic", 6, dynamic=True)
_block("block of 2 heads", 2)
_block("block of 2 heads, dynamic", 2, dynamic=True, moves=True)
for _kind in ("chunk", "3hd", "h3d", "heads chunk", "slices"):
    _block(f"qkv by {_kind}", 6, fused=_kind)
    _block(f"qkv by {_kind}, dynamic", 6, fused=_kind, dynamic=True)
for _kind in ("gqa", "interleave", "expand", "by hand"):
    for _heads, _keys in ((8, 4), (6, 3), (6, 2), (4, 1)):
        _block(f"{_keys} key heads for {_heads} by {_kind}", _heads, key_heads=_keys, repeat=_kind)
_block("2 key heads for 6 by expand, dynamic", 6, key_heads=2, dynamic=True)
_block("2 key heads for 6 in one qkv", 6, key_heads=2, fused="parts")
_block("2 key heads for 6 in slices", 6, key_heads=2, fused="slices")


class Language(nn.Module):
    """Embedding, blocks, head."""

    def __init__(self, *, tied: bool, vocabulary: int = 22) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, 32)
        self.blocks = nn.ModuleList([Block(4), Block(4, fused="chunk")])
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, vocabulary, bias=False)
        self.double()
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


_BLOCKS = {f"blocks.*.{name}": style for name, style in (_BLOCK | {"qkv": COL}).items()}


def _language(
    name: str, plan: dict[str, Any], *, tied: bool, reduces: int, gathers: int, **known: Any
) -> None:
    case(name, plan=_BLOCKS | plan, reduces=reduces, gathers=gathers, **known)(
        lambda: (Language(tied=tied), (torch.randint(22, (2, 5)),))
    )


_language("language", {}, tied=False, reduces=4, gathers=0)
_language("language by vocabulary", {"embed": ROW, "head": COL}, tied=False, reduces=5, gathers=1, share=0.56)
_language("language by columns", {"embed": COL, "head": COL}, tied=False, reduces=4, gathers=2, share=0.56)
_language("language, tied", {"embed": ROW, "head": COL}, tied=True, reduces=5, gathers=1, share=0.56)
_language("language, head by rows", {"head": ROW}, tied=False, reduces=5, gathers=0)


def main(arguments: list[str]) -> int:
    """Measure cases whose names hold one of the words given; print what is wrong in each form."""
    import zoo_transformers  # noqa: F401 - registers its cases

    words = [a for a in arguments if not a.startswith("--")]
    wide = "--all" in arguments
    failed = 0
    global RANKS
    RANKS = next((a.removeprefix("--ranks=") for a in arguments if a.startswith("--ranks=")), RANKS)
    for name, known in CASES.items():
        if words and not any(word in name for word in words):
            continue
        failed += sum(not line.startswith("ok") for line in _lines(name, known, wide=wide))
    print(f"{failed} failed")
    return failed > 0


def _lines(name: str, known: Case, *, wide: bool) -> Iterable[str]:
    for form in FORMS if wide else FORMS[: 1 if "--exported" in sys.argv else 2]:
        if form[0] and not known.strict:
            continue
        began, lines = time.perf_counter(), []
        try:
            exported = export(known, form)
        except Exception as error:
            yield (line := f"export: {type(error).__name__}: {str(error)[:200]}")
            print(f"{name:45} {_form(form):24} {line}", flush=True)
            continue
        for ranks in [int(n) for n in RANKS]:
            try:
                result = measure(known, ranks, form, exported)
                bad = problems(known, result, ranks)
                lines.append("ok" if not bad else f"{ranks} ranks: " + ", ".join(bad)[:300])
            except Exception as error:
                if "--trace" in sys.argv:
                    import traceback

                    traceback.print_exc()
                lines.append(f"{ranks} ranks: {type(error).__name__}: {str(error)[:250]}")
        seconds = time.perf_counter() - began
        text = "ok" if set(lines) == {"ok"} else " | ".join(lines)
        print(f"{name:45} {_form(form):24} {seconds:5.1f} s  {text}", flush=True)
        yield from lines


def _form(form: Form) -> str:
    return f"{'strict' if form[0] else 'non-strict'} {'decomposed' if form[1] else 'as exported'}"


if __name__ == "__main__":
    sys.modules["zoo"] = sys.modules["__main__"]
    raise SystemExit(main(sys.argv[1:]))
