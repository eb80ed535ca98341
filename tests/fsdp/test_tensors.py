"""Finding and replacing tensors in nested arguments."""

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.fsdp.tensors import cast, grad_tensors, map_tensors

Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Output:
    logits: Tensor
    name: str


def double(tensor: Tensor) -> Tensor:
    return tensor * 2


def test_every_container_keeps_its_type() -> None:
    one = torch.ones(1)
    nested = [Pair(one, 3), {"a": (one, [one])}, Output(one, "x"), OrderedDict(b=one)]
    pair, mapping, output, ordered = map_tensors(double, nested)
    assert (type(pair), pair.left.item(), pair.right) == (Pair, 2.0, 3)
    assert mapping["a"][0].item() == 2.0
    assert mapping["a"][1][0].item() == 2.0
    assert (type(output), output.logits.item(), output.name) == (Output, 2.0, "x")
    assert (type(ordered), ordered["b"].item()) == (OrderedDict, 2.0)


def test_a_mapping_whose_constructor_is_its_own_is_copied() -> None:
    class Batch(dict):
        def __init__(self, data: dict, *, source: str) -> None:
            super().__init__(data)
            self.source = source

    batch = Batch({"ids": torch.ones(1)}, source="file")
    doubled = map_tensors(double, batch)
    assert (type(doubled), doubled.source, doubled["ids"].item()) == (Batch, "file", 2.0)
    assert batch["ids"].item() == 1.0


def test_an_object_that_is_no_dict_stays_the_same_object() -> None:
    shared = UserDict(keys=torch.ones(1))
    assert map_tensors(double, {"shared": shared})["shared"] is shared


def test_what_does_not_change_is_the_same_object() -> None:
    nested = [Pair(torch.ones(1), 3), {"a": (torch.ones(1),)}, Output(torch.ones(1), "x"), None]
    assert map_tensors(lambda t: t, nested) is nested


def test_only_floating_point_tensors_are_cast() -> None:
    whole, real = torch.ones(1, dtype=torch.int64), torch.ones(1)
    cast_whole, cast_real = cast((whole, real), torch.bfloat16)
    assert cast_whole is whole
    assert cast_real.dtype == torch.bfloat16


def test_tensors_that_require_grad_are_found_in_order() -> None:
    a, b, c = (torch.ones(1, requires_grad=True) for _ in range(3))
    found = grad_tensors((a, {"x": torch.ones(1), "y": [b]}, Output(c, "x")))
    assert [id(t) for t in found] == [id(a), id(b), id(c)]
