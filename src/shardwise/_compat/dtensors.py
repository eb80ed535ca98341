"""Our own DTensors: what torch requires of a DTensor and of a placement by private names.

They are a subclass of DTensor with its own `__torch_dispatch__`, and a placement that is not an even cut.
torch's functions that make DTensors from placements make plain ones, cut evenly; `route_dtensors` redirects
calls with our placement to us.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.distributed import _state_dict_utils
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor import _api as api
from torch.distributed.tensor._dtensor_spec import DTensorSpec

# torchrec's local tensors: several shards, each with its offsets in the whole tensor.
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper as LocalShardsWrapper


def _refusal(operation: str) -> Callable[..., Any]:
    return lambda placement, *args, **kwargs: placement.refuse(operation)


class OwnShard(Shard):
    """A `Shard` with uneven parts, which torch's redistribution of plain DTensors does not support."""

    def local_rows(self, rows: int, ranks: int, rank: int) -> tuple[int, int]:
        """Return the number of `rows` rows that `rank` of `ranks` on this axis holds, and the first."""
        raise NotImplementedError

    def refuse(self, operation: str) -> Any:
        """Raise, since `operation` would cut a tensor evenly."""
        raise NotImplementedError

    # How torch finds this rank's part: for checkpoints, and to load state.
    def _local_shard_size_and_offset(self, curr_local_size: Any, num_chunks: int, rank: Any) -> Any:
        return self.local_rows(curr_local_size, num_chunks, rank)

    _shard_tensor = _refusal("to scatter a whole tensor")
    _split_tensor = _refusal("to split a whole tensor")
    _to_replicate_tensor = _refusal("to gather the rows of a plain DTensor")
    _replicate_to_shard = _refusal("to cut a plain DTensor")
    _to_new_shard_dim = _refusal("to cut a plain DTensor on another dim")
    _reduce_shard_tensor = _refusal("to reduce a plain DTensor")


class OwnSpec(DTensorSpec):
    """Describes tensors placed by an `OwnShard`, which DTensor's check of shard order would refuse."""

    def _verify_shard_order(self, shard_order: Any) -> None:
        pass


class OwnDTensor(DTensor):
    """A DTensor that runs its operations itself, and computes its description on demand.

    Its local tensor is in DTensor's own attribute `_local_tensor`, where torch's checkpoint helpers write.
    """

    # So that operations reach `__torch_dispatch__` directly.
    __torch_function__: Any = torch._C._disabled_torch_function_impl

    def description(self) -> DTensorSpec:
        raise NotImplementedError

    # `swap_tensors` assigns it after swapping what it is computed from.
    _spec = property(lambda self: self.description(), lambda self, spec: None, lambda self: None)


class MakesOwn(Protocol):
    """Makes our DTensors in place of torch's functions of the same names, with their arguments."""

    def is_asked_for(self, placements: Sequence[Placement] | None) -> bool: ...

    def from_local(
        self, local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int] | None
    ) -> DTensor: ...

    def distribute(
        self, whole: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], source: int | None
    ) -> DTensor: ...

    def redistribute(
        self, tensor: DTensor, mesh: DeviceMesh, placements: Sequence[Placement], dtype: torch.dtype | None
    ) -> DTensor: ...

    def cut_alike(self, sharded: DTensor, whole: Tensor) -> Tensor: ...


_routes: list[tuple[MakesOwn, Callable[..., DTensor]]] = []  # what makes sharded rows, and torch's function


def _distribute(
    tensor: Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    src_data_rank: int | None = 0,
    **options: Any,
) -> DTensor:
    # Runs as torch's function, in the namespace of its module.
    from shardwise._compat.dtensors import _routes as routes

    make, distribute = routes[0]
    if (
        device_mesh is None
        or placements is None
        or hasattr(tensor, "placements")
        or not make.is_asked_for(placements)
    ):
        return distribute(tensor, device_mesh, placements, src_data_rank=src_data_rank, **options)
    return make.distribute(tensor, device_mesh, placements, src_data_rank)


def fill_whole(name: str, is_sharded: Callable[[Any], bool]) -> None:
    """Make a function of `torch.nn.init` that writes by indices fill a whole plain tensor if `is_sharded`."""
    # Sharded tensors do not support indices, and the function would change the tensor before the first index
    # raises; it has no hook for subclasses.
    fill: Callable[..., Tensor] = getattr(torch.nn.init, name)

    @functools.wraps(fill)
    def filled(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not is_sharded(tensor) or tensor.is_meta:
            return fill(tensor, *args, **kwargs)
        whole = fill(torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device), *args, **kwargs)
        with torch.no_grad():
            return tensor.copy_(whole)

    setattr(torch.nn.init, name, filled)


def traced_by(own_storage: Callable[[Tensor], Tensor]) -> None:
    """Let tracers take DTensors whose local tensor has another storage offset than their wrapper."""
    # A tracer takes a DTensor apart by `__tensor_flatten__`, and makes one whose wrapper inherits the local
    # tensor's offset; then it finds that the two differ. There is no hook before that.
    flatten: Any = DTensor.__tensor_flatten__

    @functools.wraps(flatten)
    def flattened(self: DTensor) -> Any:
        local = self._local_tensor
        plain = type(self) is DTensor and type(local) is Tensor
        if plain and local.storage_offset() != self.storage_offset():
            self._local_tensor = own_storage(local)
        return flatten(self)

    DTensor.__tensor_flatten__ = flattened  # type: ignore[method-assign]


def route_dtensors(kind: type[DTensor], make: MakesOwn) -> None:
    """Make torch's functions that create DTensors from placements call `make` if the placements are ours."""
    # These functions know only `Shard` and its one way of cutting. The code of `distribute_tensor` is
    # replaced in place, since many modules have imported it by name.
    distribute: Any = api.distribute_tensor
    original = FunctionType(distribute.__code__, distribute.__globals__, "distribute_tensor")
    original.__defaults__, original.__kwdefaults__ = distribute.__defaults__, distribute.__kwdefaults__
    _routes.append((make, original))
    distribute.__code__ = _distribute.__code__
    distribute.__defaults__, distribute.__kwdefaults__ = _distribute.__defaults__, _distribute.__kwdefaults__

    from_local, redistribute = DTensor.from_local, DTensor.redistribute

    @functools.wraps(from_local)
    def routed_from_local(
        local_tensor: Tensor, device_mesh: Any = None, placements: Any = None, **kwargs: Any
    ) -> DTensor:
        if not make.is_asked_for(placements):
            return from_local(local_tensor, device_mesh, placements, **kwargs)
        return make.from_local(local_tensor, device_mesh, placements, kwargs.get("shape"))

    @functools.wraps(redistribute)
    def redistributed(
        self: DTensor, device_mesh: Any = None, placements: Any = None, **kwargs: Any
    ) -> DTensor:
        if not make.is_asked_for(placements):
            return redistribute(self, device_mesh, placements, **kwargs)
        mesh = device_mesh or self.device_mesh
        return make.redistribute(self, mesh, placements, kwargs.get("forward_dtype"))

    DTensor.from_local = staticmethod(routed_from_local)  # type: ignore[method-assign]
    DTensor.redistribute = redistributed  # type: ignore[method-assign]

    # The helper would cut a tensor by its placements, which cannot express rows next to tensor parallelism.
    helpers: Any = _state_dict_utils
    helper = helpers._distribute_tensors

    @functools.wraps(helper)
    def distribute_tensors(local: dict[str, Any], keys: list[str], *args: Any) -> None:
        for key in keys:
            if isinstance(state := local.get(key), tuple) and isinstance(state[0], kind):
                local[key] = make.cut_alike(*state)
        helper(local, keys, *args)

    helpers._distribute_tensors = distribute_tensors


def extend_state_dict_helpers(kind: type[Tensor], *, cut: Callable[[Any, Tensor], Tensor]) -> None:
    """Make torch's `get_state_dict` and `set_state_dict` gather and cut tensors of `kind` like DTensors."""
    # There is no hook for this, and otherwise `full_state_dict=True` would treat such tensors as whole.
    from torch.distributed import _state_dict_utils
    from torch.distributed.checkpoint import state_dict

    utils, helpers = cast(Any, _state_dict_utils), cast(Any, state_dict)
    iterate, broadcast = utils._iterate_state_dict, utils._broadcast_tensors
    distribute = helpers._distribute_state_dict

    def gather(value: Any, sharded: Any, dtensor: Any, plain: Any, **options: Any) -> Any:
        if isinstance(value, kind) and dtensor is not plain is utils._identity_func:
            value = cast(Any, value).full_tensor()
        return iterate(value, sharded, dtensor, plain, **options)

    @contextmanager
    def cut_again(local: dict[str, Any], keys: Sequence[str]) -> Iterator[None]:
        parts = {key: local[key] for key in keys if isinstance(local.get(key), kind)}
        yield
        local.update({key: cut(part, local[key]) for key, part in parts.items()})

    def broadcast_tensors(full: dict[str, Any], local: dict[str, Any], keys: list[str], *args: Any) -> None:
        with cut_again(local, keys):
            broadcast(full, local, keys, *args)

    def distribute_state_dict(full: dict[str, Any], local: dict[str, Any], **options: Any) -> None:
        for key, value in full.items():  # one at a time: all whole tensors would not fit
            with cut_again(local, [key]):
                distribute({key: value}, local, **options)

    utils._iterate_state_dict = gather
    utils._broadcast_tensors = broadcast_tensors
    helpers._distribute_state_dict = distribute_state_dict
