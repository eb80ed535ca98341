"""Expert parallelism: tokens travel to the experts that they chose, and results come back.

    here                tokens sorted by the experts that they chose
    all-to-all          rank 0's tokens, rank 1's, ..., each sorted by this rank's experts
    experts             tokens sorted by this rank's experts
    all-to-all          back, into the tokens' original order, weighted and summed

The number of tokens for each rank differs from step to step, so an all-to-all of counts comes first; the host
reads its result.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from shardwise import _compat
from shardwise.errors import ShardingError, here

DTYPES = [dtype for _, dtype in sorted(vars(torch).items()) if isinstance(dtype, torch.dtype)]
Experts = Callable[[Tensor, Tensor], Tensor]
Mixture = Callable[[Tensor, Tensor, Tensor], Tensor]


class ExpertCut:
    """Experts divided evenly, in order, over the ranks of a mesh.

        cut = ExpertCut(mesh["ep"], 8)
        cut.distribute(experts)                                # parameters [8, ...] -> [8 / ranks, ...] here
        fully_shard(experts, mesh=...).set_gradient_divide_factor(...)
        mixed = cut.mixture(experts)(tokens, chosen, weights)  # [n, width], [n, k], [n, k] -> [n, width]

    An expert's gradient sums over the tokens of all ranks of the mesh; a dense parameter's covers only this
    rank's tokens. `fully_shard` averages both over ranks, so gradients of experts come out larger by a factor
    of the mesh's size. Divide them by the number of all ranks with different tokens,
    `dimensions.data_ranks(mesh)`.

    Args:
        mesh: a 1-D mesh of the ranks, in order. None: every rank has all experts.
        experts: number of experts, a multiple of the ranks.
        tp_mesh: the tensor-parallel ranks, which have the same tokens; each sends an even share of them.

    Raises:
        ShardingError: experts that cannot be divided evenly.
    """

    def __init__(self, mesh: DeviceMesh | None, experts: int, *, tp_mesh: DeviceMesh | None = None) -> None:
        self.mesh, self.tp_mesh, self.count = mesh, tp_mesh, experts
        self.ranks = 1 if mesh is None else mesh.size()
        if experts % self.ranks or not experts:
            raise ShardingError(
                f"{here()}: {experts} experts over {self.ranks} ranks; expected a multiple of the ranks"
            )

    def distribute(self, module: nn.Module) -> None:
        """Cut parameters [experts, ...] over the ranks, as DTensors. Collective.

        Raises:
            ShardingError: a parameter whose dim 0 is not the number of experts. Nothing has been cut then.
        """
        params = dict(module.named_parameters())
        for name, param in params.items():
            if not param.ndim or param.shape[0] != self.count:
                raise ShardingError(
                    f"{here()}: '{name}' has shape {tuple(param.shape)}; expected dim 0 of {self.count},"
                    " the number of experts"
                )
        if self.mesh is None:
            return
        for name, param in params.items():
            owner, _, attribute = name.rpartition(".")
            cut = nn.Parameter(distribute_tensor(param, self.mesh, [Shard(0)]), param.requires_grad)
            module.get_submodule(owner).register_parameter(attribute, cut)

    def mixture(self, function: Experts) -> Mixture:
        """Return a mixture for this rank's tokens that runs `function` for its experts. Calls are collective.

        Args:
            function: takes tokens [m, width] sorted by this rank's experts, and each expert's number of
                tokens, int64 [experts / ranks]; returns results [m, any width]. m may be 0.

        Returns:
            A function that takes tokens [n, width], the indices of the experts that each chose, int64 [n, k],
            and their weights [n, k]; it returns weighted sums of results [n, any width]. n may be 0.

        Raises:
            ShardingError: in the returned function, on every rank: an index on any rank that is of no expert;
                tokens whose width or dtype differs between ranks.
        """

        def mix(tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
            rows = len(tokens)
            tokens, chosen, weights = (self._share(t) for t in (tokens, chosen, weights))
            choices = chosen.reshape(-1)
            order = choices.argsort(stable=True)
            counts, arriving = self._count_tokens(choices, tokens)
            sends, receives = counts.sum(1).tolist(), arriving.sum(1).tolist()
            received = self._exchange(tokens[order // chosen.shape[1]], receives, sends)
            expert = torch.arange(self.count // self.ranks, device=tokens.device).repeat(self.ranks)
            by_expert = expert.repeat_interleave(arriving.reshape(-1)).argsort(stable=True)
            outputs = function(received[by_expert], arriving.sum(0))
            results = self._exchange(outputs[by_expert.argsort()], sends, receives)[order.argsort()]
            per_choice = results.view(*chosen.shape, results.shape[1])
            return self._whole((per_choice * weights.unsqueeze(-1)).sum(1), rows)

        return mix

    def _count_tokens(self, choices: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Count tokens sent to each rank's experts [ranks, its experts], and from each rank to this one's."""
        inside = (choices >= 0) & (choices < self.count)
        counts = torch.bincount(choices.where(inside, 0), minlength=self.count).view(self.ranks, -1)
        form = counts.new_tensor([tokens.shape[1], DTYPES.index(tokens.dtype)])
        message = torch.cat([counts.where(inside.all(), -1), form.expand(self.ranks, 2)], 1)
        if self.mesh is not None:
            dist.all_to_all_single(message, message.clone(), group=self.mesh.get_group())
        arriving, forms = message[:, :-2].contiguous(), message[:, -2:]
        differs, outside = (forms != form).any(), (arriving < 0).any(1)
        if not differs | outside.any():  # the host waits for the device once
            return counts, arriving
        if differs:
            pairs = enumerate(forms.tolist())
            listed = "; ".join(f"rank {rank}: {width}, {DTYPES[index]}" for rank, (width, index) in pairs)
            raise ShardingError(
                f"{here()}: ranks of the mesh give tokens of different widths or dtypes ({listed}); give all"
                " the same"
            )
        raise ShardingError(
            f"{here()}: tokens of ranks {outside.nonzero().flatten().tolist()} of the mesh chose experts"
            f" that are not of the {self.count}; expected numbers from 0 to {self.count - 1}"
        )

    def _exchange(self, rows: Tensor, receives: list[int], sends: list[int]) -> Tensor:
        return rows if self.mesh is None else _compat.exchange(rows, receives, sends, self.mesh.get_group())

    def _share(self, whole: Tensor) -> Tensor:
        """Return this rank's share of the rows that all ranks of tp_mesh have."""
        if self.tp_mesh is None:
            return whole
        replicated = DTensor.from_local(whole, self.tp_mesh, [Replicate()], run_check=False)
        return replicated.redistribute(self.tp_mesh, [Shard(0)]).to_local()

    def _whole(self, share: Tensor, rows: int) -> Tensor:
        if self.tp_mesh is None:
            return share
        shape, stride = torch.Size((rows, share.shape[1])), (share.shape[1], 1)
        cut = DTensor.from_local(share, self.tp_mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)
        return cut.full_tensor()
