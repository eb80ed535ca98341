"""Finding and replacing tensors in nested arguments."""

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardwise.fsdp.tensors import cast, grad_tensors, hand_back, map_tensors

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


def test_a_list_of_a_class_of_its_own_keeps_its_items_and_attributes() -> None:
    class Features(list):
        def __init__(self, name: str, items: Any = ()) -> None:
            super().__init__(items)
            self.name = name

    made = map_tensors(double, Features("f", [torch.ones(1)]))
    assert (type(made), made.name, [one.item() for one in made]) == (Features, "f", [2.0])


def test_a_tuple_of_a_class_of_its_own_keeps_its_class_and_attributes() -> None:
    class Named(tuple):
        def __new__(cls, name: str, *items: Tensor) -> Any:
            made = super().__new__(cls, items)
            made.name = name
            return made

    made = map_tensors(double, Named("t", torch.ones(1)))
    assert (type(made), made.name, made[0].item()) == (Named, "t", 2.0)


def test_a_dataclass_is_not_initialised_again() -> None:
    @dataclass
    class Counted:
        tensor: Tensor
        count: int = field(init=False, default=7)

    given = Counted(torch.ones(1))
    given.count = 3
    made = map_tensors(double, given)
    assert (made.tensor.item(), made.count, given.tensor.item()) == (2.0, 3, 1.0)


def test_what_was_written_to_rebuilt_containers_is_handed_back() -> None:
    one, two, new = (torch.full((1,), value) for value in (1.0, 2.0, 3.0))
    given = {"list": [one, two], "kept": one, "gone": two, "output": Output(one, "x")}
    inner, output, rebuilt = given["list"], given["output"], []
    made = map_tensors(double, given, rebuilt)
    hand_back(rebuilt)
    assert given == {"list": inner, "kept": one, "gone": two, "output": output}
    made["list"].append(new)
    del made["list"][0], made["gone"]
    made["new"], made["output"].name = new, "y"
    hand_back(rebuilt)
    assert given["list"] is inner
    assert [id(each) for each in inner] == [id(two), id(new)]
    assert list(given) == ["list", "kept", "output", "new"]
    assert given["kept"] is one
    assert given["output"] is output
    assert (output.logits is one, output.name) == (True, "y")
