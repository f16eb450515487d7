"""Styles for DTensor's parallelize_module: each splits one module over tensor-parallel ranks.

    parallelize_module(mlp, mesh, GatherInput())
    parallelize_module(mlp, mesh, {"w1": ColumnParallel(), "w2": RowParallel()})

A linear layer y = x W^T is split by the rows of W, which are columns of its output (column
parallel), or by the columns of W, each of which takes a part of the input and gives a summand
(row parallel). A column-parallel layer followed by a row-parallel one needs one exchange at each
end. Between such pairs activations are [B, S / tp, E]: each rank has some of the tokens, and
norms and residual sums are computed once and not tp times.

A style replaces a weight by this rank's shard, a plain parameter under the same name.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from parallel.tensor.exchanges import gather_sequence, scatter_sum, summed_gradient


class Style(ParallelStyle):
    """Base of all styles: splits parameters, and lets :meth:`change` alter the forward pass."""

    split_dims: ClassVar[dict[str, int]] = {}
    """The dimension that each split parameter is split along, by its name."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.change(module, device_mesh)
        for name, dim in self.split_dims.items():
            if module._parameters.get(name) is not None:
                keep_part(module, name, device_mesh, dim)
        return module

    def change(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Add the exchanges that the module's forward pass needs."""


class GatherInput(Style):
    """Gathers the module's first input, this rank's tokens, to all tokens."""

    def change(self, module: nn.Module, mesh: DeviceMesh) -> None:
        def gather(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            return gather_sequence(inputs[0], mesh), *inputs[1:]

        module.register_forward_pre_hook(gather)


class ParallelHeads(GatherInput):
    """An attention layer of all tokens and this rank's heads; of its sinks it keeps those heads'.

    Its projections, split by heads, have styles of their own.
    """

    split_dims: ClassVar[dict[str, int]] = {"sinks": 0}


class ColumnParallel(Style):
    """A linear layer of all tokens that gives this rank's part of the output features."""

    split_dims: ClassVar[dict[str, int]] = {"weight": 0, "bias": 0}


class GatheredColumnParallel(ColumnParallel, GatherInput):
    """A column-parallel layer that gathers the tokens itself, where no module around it does."""


class RowParallel(Style):
    """A linear layer of this rank's part of the input features, [B, S, d_in / tp].

    Gives the sum over ranks, this rank's tokens of it. Raises ValueError for a layer with a
    bias, which every rank would add to its part of the sum.
    """

    split_dims: ClassVar[dict[str, int]] = {"weight": 1}

    def change(self, module: nn.Module, mesh: DeviceMesh) -> None:
        if getattr(module, "bias", None) is not None:
            raise ValueError(f"{module}: a row-parallel layer cannot have a bias; use bias=False")

        def scatter(_: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
            return scatter_sum(output, mesh)

        module.register_forward_hook(scatter)


class VocabParallelEmbedding(Style):
    """An embedding whose rows are split over the ranks; gives this rank's tokens [B, S / tp, E].

    Raises ValueError for any other module, and for an embedding that does more than look up.
    """

    split_dims: ClassVar[dict[str, int]] = {"weight": 0}

    def change(self, module: nn.Module, mesh: DeviceMesh) -> None:
        plain = isinstance(module, nn.Embedding) and not (
            module.max_norm is not None
            or module.padding_idx is not None
            or module.scale_grad_by_freq
            or module.sparse
        )
        if not plain:
            raise ValueError(f"{module}: must be an nn.Embedding that only looks up")
        module.__class__ = _PartOfEmbedding
        module.mesh = mesh


class SequenceParallelNorm(Style):
    """An RMSNorm of this rank's tokens alone, whose weight all ranks hold.

    Raises ValueError for any other module.
    """

    def change(self, module: nn.Module, mesh: DeviceMesh) -> None:
        if not isinstance(module, nn.RMSNorm):
            raise ValueError(f"{module}: must be an nn.RMSNorm")
        module.__class__ = _NormOfOwnTokens
        module.mesh = mesh


class _PartOfEmbedding(nn.Embedding):
    """An embedding of some rows of the vocabulary."""

    mesh: DeviceMesh

    def forward(self, tokens: Tensor) -> Tensor:
        num_rows = self.weight.shape[0]
        row = tokens - self.mesh.get_local_rank() * num_rows
        elsewhere = (row < 0) | (row >= num_rows)
        found = F.embedding(row.masked_fill(elsewhere, 0), self.weight)
        # One rank has the row and all others zero: the sum is exact.
        return scatter_sum(found.masked_fill(elsewhere.unsqueeze(-1), 0), self.mesh)


class _NormOfOwnTokens(nn.RMSNorm):
    """An RMSNorm of this rank's tokens, whose weight's gradient is summed over ranks."""

    mesh: DeviceMesh

    def forward(self, x: Tensor) -> Tensor:
        weight = None if self.weight is None else summed_gradient(self.weight, self.mesh)
        return F.rms_norm(x, self.normalized_shape, weight, self.eps)


def keep_part(module: nn.Module, name: str, mesh: DeviceMesh, dim: int) -> None:
    """Replace a whole parameter by this rank's of ``mesh.size()`` equal parts along ``dim``.

    Raises ValueError if they would not be equal.
    """
    whole = getattr(module, name)
    if whole.shape[dim] % mesh.size():
        raise ValueError(
            f"{name} of {module}: {whole.shape[dim]} along dim {dim} do not divide by "
            f"{mesh.size()} tensor-parallel ranks"
        )
    part = whole.detach().chunk(mesh.size(), dim)[mesh.get_local_rank()]
    # Not a view, which would keep the whole in memory.
    part = part.clone(memory_format=torch.contiguous_format)
    setattr(module, name, nn.Parameter(part, requires_grad=whole.requires_grad))
