"""What operations do to tensors of boxes is what they do to values."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from shardwise.hf.boxes import Boxes, Computed, Plain
from shardwise.layout import Box

CONVERSIONS = {
    "experts stacked and fused": lambda a, b, c, d: torch.cat(
        [torch.stack([a, b]), torch.stack([c, d])], dim=1
    ),
    "experts taken apart": lambda a, b, c, d: torch.stack([a, b, c, d]).chunk(4, dim=0)[2].squeeze(0),
    "transposed and halved": lambda a, b, c, d: (
        torch.cat([a, c]).transpose(0, 1).contiguous().chunk(2, dim=-1)[1]
    ),
    "by sizes": lambda a, b, c, d: torch.cat([a, b], dim=1).split([3, 5], dim=1)[1],
    "unbound": lambda a, b, c, d: torch.stack([a, b, c], dim=2).unbind(1)[3],
    "in another dtype": lambda a, b, c, d: torch.stack([a, b]).to(torch.bfloat16),
    "computed": lambda a, b, c, d: (torch.cat([a, b]) * 2).view(2, 6, 4).transpose(0, 1)[2:],
}


def conversion_of_boxes(name: str) -> tuple[Tensor, Boxes]:
    torch.manual_seed(0)
    values = [torch.randn(6, 4) for _ in range(4)]
    boxes = [Boxes.of(Plain(value), value.shape, value.dtype) for value in values]
    expected, found = CONVERSIONS[name](*values), CONVERSIONS[name](*boxes)
    assert isinstance(found, Boxes)
    return expected, found


@pytest.mark.parametrize("name", CONVERSIONS)
@settings(max_examples=30)
@given(data=st.data())
def test_any_box_of_a_converted_tensor_is_read_as_it_would_be_cut_from_the_whole(
    name: str, data: st.DataObject
) -> None:
    expected, found = conversion_of_boxes(name)
    begins = [data.draw(st.integers(0, size)) for size in expected.shape]
    sizes = [data.draw(st.integers(0, size - b)) for size, b in zip(expected.shape, begins, strict=True)]
    box = Box(tuple(begins), tuple(sizes))
    read = found.read(box)
    assert read.dtype == expected.dtype
    assert torch.equal(read, expected[tuple(map(slice, box.offsets, box.ends))])


def test_only_what_computes_needs_a_whole_tensor() -> None:
    computes = {
        name: any(isinstance(piece.source, Computed) for piece in conversion_of_boxes(name)[1].pieces)
        for name in CONVERSIONS
    }
    assert [name for name, found in computes.items() if found] == ["computed"]


def test_boxes_are_equal_where_their_values_are() -> None:
    value = torch.randn(3, 2)
    one, same, other = (Boxes.of(Plain(v), (3, 2), v.dtype) for v in (value, value.clone(), value + 1))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_a_copy_has_the_same_pieces_and_a_parameter_stays_one() -> None:
    value = torch.randn(3, 2)
    module = nn.Module()
    module.buffer = nn.Buffer(Boxes.of(Plain(value), value.shape, value.dtype))
    module.param = nn.Parameter(Boxes.of(Plain(value), value.shape, value.dtype), requires_grad=False)
    module.tied = module.param
    found = copy.deepcopy(module)
    assert found.tied is found.param is not module.param
    assert found.param.pieces == module.param.pieces
    assert isinstance(found.param, nn.Parameter)
    assert not found.param.requires_grad
    assert torch.equal(found.param, value)
    assert torch.equal(found.buffer, value)
