"""Losses of logits that are cut by vocabulary: right, and the logits never gathered."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import lockstep
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.tensor_parallel import ColwiseParallel, counts, tensor_parallel_transformation
from shardwise.tensor_parallel.state import placement_from_json, record_of, shard_of

WORDS = 3
Loss = Callable[[Tensor, Tensor, Tensor], Any]


class Head(nn.Module):
    """Logits and `loss(logits, targets, weights of the words)`."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.inner, self.head, self.loss = nn.Linear(6, 6), nn.Linear(6, WORDS, bias=False), loss
        self.register_buffer("weights", torch.rand(WORDS) + 0.5)

    def forward(self, x: Tensor, targets: Tensor) -> Any:
        return self.loss(self.head(self.inner(x).tanh()), targets, self.weights)


def rows(z: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    return z.view(-1, WORDS), t.view(-1)


def shifted(z: Tensor, t: Tensor, w: Tensor) -> Tensor:
    """As a language model of Hugging Face has it: every place predicts the next one."""
    t = F.pad(t, (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(*rows(z.float(), t), ignore_index=-100, reduction="mean")


def sliced(z: Tensor, t: Tensor, w: Tensor) -> Tensor:
    return F.cross_entropy(*rows(z[:, :-1].contiguous(), t[:, 1:].contiguous()))


def by_probabilities(z: Tensor, t: Tensor, w: Tensor) -> Tensor:
    targets = F.one_hot(t.clamp(min=0), WORDS).to(z.dtype).add(0.1)
    return F.cross_entropy(z.view(-1, WORDS), targets.view(-1, WORDS), weight=w, label_smoothing=0.1)


def chosen(z: Tensor, t: Tensor, w: Tensor) -> Tensor:
    logs = z.log_softmax(-1).gather(-1, t.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return -(logs * (t >= 0)).sum(-1)


def with_entropy(z: Tensor, t: Tensor, w: Tensor) -> Tensor:
    """The logarithm has another use after the loss."""
    log = F.log_softmax(z.view(-1, WORDS), -1)
    return F.nll_loss(log, t.view(-1)) + 0.1 * (log.exp() * log).sum(-1).mean()


LOSSES: dict[str, Loss] = {
    "mean": lambda z, t, w: F.cross_entropy(*rows(z, t)),
    "sum, weights": lambda z, t, w: F.cross_entropy(*rows(z, t), weight=w, reduction="sum"),
    "mean, weights": lambda z, t, w: F.cross_entropy(*rows(z, t), weight=w),
    "a word ignored": lambda z, t, w: F.cross_entropy(*rows(z, t.clamp(min=0)), ignore_index=2),
    "of each row": lambda z, t, w: F.cross_entropy(*rows(z, t), reduction="none"),
    "smoothed": lambda z, t, w: F.cross_entropy(*rows(z, t), label_smoothing=0.2),
    "smoothed, weights": lambda z, t, w: F.cross_entropy(
        *rows(z, t), label_smoothing=0.2, weight=w, reduction="none"
    ),
    "probabilities": by_probabilities,
    "words not last": lambda z, t, w: F.cross_entropy(z.transpose(1, 2), t),
    "two dims of places": lambda z, t, w: F.cross_entropy(
        z.permute(2, 0, 1)[None], t[None], reduction="none"
    ),
    "one row": lambda z, t, w: F.cross_entropy(z[0, 0], t[0, 0]),
    "shifted": shifted,
    "sliced": sliced,
    "a logarithm and its loss": lambda z, t, w: F.nll_loss(F.log_softmax(z, -1).transpose(1, 2), t, weight=w),
    "elements chosen": chosen,
    "a second use of the logarithm": with_entropy,
    "softmax": lambda z, t, w: z.softmax(-1).square().sum(-1),
}
# all-reduces: maxima, and sums; more where elements themselves are used, or a sum over words
SUMS = {"a second use of the logarithm": 3, "softmax": 3}


def drawn() -> tuple[Tensor, Tensor]:
    """Values, and targets some of which are ignored."""
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(WORDS, (3, 4), generator=generator)
    targets[0, 1] = targets[2, 3] = -100
    return torch.randn(3, 4, 6, generator=generator), targets


def cut(program: Any, ranks: int, rank: int, *, training: bool = False) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing has its inputs gathered for want of a rule
        return tensor_parallel_transformation(
            program, rank, ranks, "cpu", {"head": ColwiseParallel}, training=training
        )


def exported(loss: Loss, *args: Tensor, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Any]:
    torch.manual_seed(1)
    model = Head(loss).to(dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model, torch.export.export(model, args)


def core(program: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return program.run_decompositions()


def all_losses(z: Tensor, t: Tensor, w: Tensor) -> dict[str, Tensor]:
    return {name: loss(z, t, w) for name, loss in LOSSES.items()}


@functools.cache
def everything() -> tuple[nn.Module, Any, tuple[Tensor, Tensor]]:
    """All losses in one model, its program and inputs."""
    x, targets = drawn()
    return *exported(all_losses, x.double(), targets, dtype=torch.float64), (x.double(), targets)


@pytest.mark.parametrize("ranks", [3, 4])  # of four, one has no word
def test_losses_are_those_of_whole_logits_and_take_two_all_reduces_each(ranks):
    model, program, inputs = everything()
    programs = [cut(program, ranks, rank) for rank in range(ranks)]
    expected = model(*inputs)
    for losses in lockstep.run(programs, *inputs):
        for (name, value), loss in zip(expected.items(), losses, strict=True):
            torch.testing.assert_close(loss, value, msg=lambda m, n=name: f"{n}: {m}")
    for loss in programs:
        assert counts(loss) == {"all_reduce": sum(SUMS.get(name, 2) for name in LOSSES)}


def test_decomposed_losses_take_two_all_reduces_each():
    x, targets = drawn()
    names = ("sliced", "words not last", "of each row", "elements chosen", "two dims of places")
    model, program = exported(lambda z, t, w: tuple(LOSSES[name](z, t, w) for name in names), x, targets)
    decomposed = core(program)
    programs = [cut(decomposed, 2, rank) for rank in range(2)]
    for losses in lockstep.run(programs, x, targets):
        torch.testing.assert_close(tuple(losses), model(x, targets))
    assert counts(programs[0]) == {"all_reduce": 2 * len(names)}


@pytest.mark.parametrize("name", ["shifted", "mean", "a logarithm and its loss"])
def test_a_loss_in_bfloat16_is_at_least_as_exact(name):
    x, targets = drawn()
    x = x.bfloat16()
    model, program = exported(LOSSES[name], x, targets, dtype=torch.bfloat16)
    expected = model(x, targets)
    for (loss,) in lockstep.run([cut(program, 2, rank) for rank in range(2)], x, targets):
        assert loss.dtype == expected.dtype
        torch.testing.assert_close(loss, expected, rtol=2e-2, atol=2e-2)


def test_one_program_serves_every_number_of_rows():
    x, targets = drawn()
    torch.manual_seed(1)
    model = Head(shifted)
    sizes = {0: torch.export.Dim("batch", max=64), 1: torch.export.Dim("length", min=2, max=64)}
    program = torch.export.export(model, (x, targets), dynamic_shapes=(sizes, sizes))
    programs = [cut(program, 2, rank) for rank in range(2)]
    for logits in (x, torch.cat([x, x], 1)[:1]):
        labels = torch.arange(logits[..., 0].numel()).view(logits.shape[:2]) % WORDS
        for (loss,) in lockstep.run(programs, logits, labels):
            torch.testing.assert_close(loss, model(logits, labels))


def test_logits_that_are_gathered_before_serve_the_loss_too():
    x, targets = drawn()

    def loss(z: Tensor, t: Tensor, w: Tensor) -> Tensor:
        logits, labels = rows(z, t)
        return logits.sort(-1).values.sum() + F.cross_entropy(logits, labels)

    model, program = exported(loss, x, targets)
    programs = [cut(program, 2, rank) for rank in range(2)]
    for (result,) in lockstep.run(programs, x, targets):
        torch.testing.assert_close(result, model(x, targets))
    assert counts(programs[0]) == {"all_gather": 1}


def test_gradients_of_losses_are_the_whole_models_and_take_no_all_reduce_of_their_own():
    model, program, inputs = everything()
    programs = [cut(program, 4, rank, training=True) for rank in range(4)]

    def total(losses: Any) -> Tensor:
        return sum((loss * (place + 1)).sum() for place, loss in enumerate(losses))

    total(model(*inputs).values()).backward()
    backward = lockstep.backward([total(losses) for losses in lockstep.run(programs, *inputs)])
    whole = dict(model.named_parameters())
    for rank, part in enumerate(programs):
        entries = record_of(part)["parameters"]
        for name, parameter in whole.items():
            grad = shard_of(parameter.grad, placement_from_json(entries[name]["placement"]), rank)
            torch.testing.assert_close(part.state_dict[name].grad, grad, msg=lambda m, n=name: f"{n}: {m}")
    # that of the head's inputs; and of rows, where sums over words go back into words
    assert backward == {"all_reduce": 1 + len(SUMS)}
