"""Models of our own for the zoo: layers, operations, convolutions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim
from zoo import COL, ROW, case

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


@case("weights by @", plan={"w.up": COL, "w.down": ROW}, reduces=4, share=0.55)
def weights_by_operator() -> Any:
    """Of inputs of 1 to 4 dims."""

    def body(m: Any, *inputs: Tensor) -> list[Tensor]:
        return [F.gelu(x @ m.w["up"]) @ m.w["down"] for x in inputs]

    weights = nn.ParameterDict({"up": values(6, 14), "down": values(14, 6)})
    return Layers(body, w=weights), tuple(values(*(2, 3, 4)[:n], 6) for n in range(4))


@case("weights by @ and transposed", plan={"w.a": COL, "w.b": ROW}, gathers=None)
def weights_by_operator_both_ways() -> Any:
    def body(m: Any, x: Tensor) -> Any:
        a, b = m.w["a"], m.w["b"]
        return x @ a, x @ a.t(), x[0] @ b, x[0, 0] @ b.t(), (x @ b).relu() @ a, b.t() @ a

    weights = nn.ParameterDict({"a": values(7, 7), "b": values(7, 7)})
    return Layers(body, w=weights), (values(2, 3, 7),)


@case("empty parts", plan={"up": COL}, gathers=None)
def empty_parts() -> Any:
    def body(m: Any, x: Tensor) -> Any:
        y = m.up(x)
        return y[..., 5:5], y.split([9, 0], -1)[1] + 1, torch.cat([y[..., 9:], x * 2], -1)

    return Layers(body, up=nn.Linear(6, 9)), (values(2, 3, 6),)


@case("row only", plan={"down": ROW}, reduces=1)
def row_only() -> Any:
    return Layers(lambda m, x: m.down(x).relu(), down=nn.Linear(9, 6)), (values(4, 9),)


@case(
    "gate of one feature",
    plan={"gate": COL, "pair": COL, "up": COL, "thin.0": COL, "down": ROW, "thin.1": ROW},
    gathers=None,
)
def one_feature() -> Any:
    def body(m: Any, x: Tensor) -> Tensor:
        gate = m.gate(x)
        scale, shift = m.pair(x).chunk(2, -1)
        y = torch.sigmoid(gate) * m.down(F.relu(m.up(x))) + gate.squeeze(-1).unsqueeze(-1) * m.thin(x)
        y = (
            y * scale.softmax(0)
            + shift
            + gate.view(4).reshape(4, 1)
            + gate.expand(4, 5) @ gate.expand(4, 5).mT
        )
        return torch.where(gate > 0, y, m.up(x)[:, :1]) + gate.softmax(-1)

    return Layers(
        body,
        gate=nn.Linear(4, 1),
        pair=nn.Linear(4, 2),
        up=nn.Linear(4, 6),
        down=nn.Linear(6, 4),
        thin=nn.Sequential(nn.Linear(4, 1), nn.Linear(1, 4)),
    ), (values(4, 4),)


@case("one channel", plan={"a": COL, "c": ROW, "gate": COL, "up": COL, "same": ROW}, gathers=None)
def one_channel() -> Any:
    def body(m: Any, x: Tensor) -> Tensor:
        y = m.c(F.relu(m.b(m.a(x)))) * m.gate(x).sigmoid()
        return m.same(y) + m.up(y)[:, :1]

    layers = {
        "a": nn.Conv2d(3, 1, 3, padding=1),
        "b": nn.BatchNorm2d(1),
        "c": nn.Conv2d(1, 3, 3, padding=1),
        "gate": nn.Conv2d(3, 1, 1),
        "up": nn.Conv2d(3, 2, 1),
        "same": nn.Conv2d(3, 3, 1),
    }
    return Layers(body, **layers), (values(2, 3, 4, 4),)


@case("tables of one row and of one column", plan={"a": ROW, "b": COL, "c": ROW}, gathers=None)
def one_row() -> Any:
    def body(m: Any, ids: Tensor) -> Tensor:
        return m.a(ids * 0) + m.c(m.b(ids))

    layers = {"a": nn.Embedding(1, 4), "b": nn.Embedding(5, 1), "c": nn.Linear(1, 4)}
    return Layers(body, **layers), (torch.tensor([[0, 4, 2], [1, 3, 3]]),)


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
        along = (y.sum(0), y.var(1), torch.var_mean(y, 1, keepdim=True), y.max(0), y.norm(dim=0), y.std(1))
        return (
            var,
            mean,
            wholes,
            along,
            torch.topk(y, 2),
            y.argmax(-1),
            y.softmax(-1),
            y.sort(0),
            y.logsumexp(1),
        )

    return Layers(body, up=nn.Linear(6, 10)), (values(4, 3, 6),)


@case("reductions of a number", plan={"up": COL}, gathers=None)
def reductions_of_a_number() -> Any:
    def body(m: Any, x: Tensor) -> Any:
        y = m.up(x)
        s, whole = y.mean((0, 1)), y.amax()
        along = [op(s, 0) for op in (torch.amax, torch.sum, torch.mean, torch.logsumexp)]
        shaped = s.softmax(-1), s.cumsum(0), s.flip(0), s.squeeze(0), s.sort(0), s.topk(1), s.max(0)
        return along, shaped, torch.stack([s, whole]), whole.squeeze(-1)

    return Layers(body, up=nn.Linear(6, 10)), (values(4, 6),)


@case("logarithm, then several results", plan={"up": COL}, gathers=None)
def several_of_a_logarithm() -> Any:
    def body(m: Any, x: Tensor) -> Any:
        y = F.log_softmax(m.up(x), -1)
        z = F.log_softmax(m.up(x), -1)
        return y.topk(3), z.chunk(2)

    return Layers(body, up=nn.Linear(6, 10)), (values(4, 6),)


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
            y[:, :1].expand_as(y),
        )

    return Layers(body, up=nn.Linear(6, 12)), (values(4, 3, 6),)


@case("indices", plan={"up": COL}, gathers=None)
def indices() -> Any:
    def body(m: Any, x: Tensor, i: Tensor) -> Any:
        y = m.up(x)
        picks = torch.index_select(y, 1, i), y[:, i], y[i, i], y[..., i], torch.where(y > 0, y, 0.0)
        return (
            picks,
            y.gather(1, i[None, :, None].expand(4, 2, 12)),
            y.masked_fill(y > 0, 0),
            y[:, :, -1],
            y.cumsum(1),
            y.slice_scatter(2 * y, -1),
            y.index_put((torch.tensor([1, 3]), i), 2 * y[:2, 0]),
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
        y.mul_(0.5)
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
        "a": nn.Conv2d(3, 8, 3, padding=2, dilation=2),
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
        return m.b(torch.native_group_norm(m.g(m.d(m.a(x))), None, None, 2, 24, 8, 6, 1e-5)[0])

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
