"""An optimizer whose state is sharded: each rank keeps the state of the parameters it owns.

Every rank has all gradients, updates its own parameters and broadcasts them. Memory for the
state is divided by the ranks; each step sends the parameters once more than plain data
parallelism does. CS336 assignment 2, section 3; ZeRO stage 1 (Rajbhandari et al., 2020,
P_os) without its saving of communication.

A parameter's owner has it whole, with its whole gradient, so that the optimizer may look at more
than one element at a time: Muon orthogonalises each matrix on one rank alone, and the ranks share
the matrices out by that work (Jordan et al., "Muon: An optimizer for hidden layers in neural
networks", 2024; Liu et al., "Muon is scalable for LLM training", 2025, section 2.4).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from parallel.data.flat import FlatLayout


class ShardedOptimizer(Optimizer):
    """Any optimizer, its state sharded over ranks by whole parameters.

    Parameters go to ranks from the largest on, each to the rank with the least work so far, so
    that a step takes ranks about equally long. Those of one owner become views of one buffer,
    which a single broadcast sends. Options of ``param_groups``, such as a learning rate
    that a schedule changes, count on all ranks.

    Args:
        params: parameters or parameter groups, the same and in the same order on all ranks.
        optimizer_cls: makes the optimizer of each rank's own parameters.
        process_group: the ranks; the world if None, and one where there is no process group.
        work: what the step of a parameter costs, in any unit. If None, its elements, and for
            optimizers called Muon :func:`newton_schulz_flops`.
        kwargs: further arguments of ``optimizer_cls``.

    Raises:
        ValueError: there are no parameters, they lie on several devices, or are shards.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_cls: type[Optimizer],
        *,
        process_group: dist.ProcessGroup | None = None,
        work: Callable[[Tensor], float] | None = None,
        **kwargs: Any,
    ) -> None:
        if process_group is None and dist.is_initialized():
            process_group = dist.group.WORLD
        self._group = process_group
        self._num_ranks = 1 if process_group is None else process_group.size()
        self._rank = 0 if process_group is None else dist.get_rank(process_group)
        self._owners: dict[Tensor, int] = {}
        self._num_elements = [0] * self._num_ranks
        if work is None:
            is_muon = "muon" in optimizer_cls.__name__.lower()
            work = newton_schulz_flops if is_muon else Tensor.numel
        self._work_of, self._work = work, [0.0] * self._num_ranks
        self._buffers: list[tuple[int, Tensor]] = []
        self._places: dict[Tensor, int] = {}
        """Where the parameters lie in the buffers."""
        self._local: Optimizer | None = None
        super().__init__(params, dict(kwargs))
        # Only now, so that the largest of all groups are the first to be given an owner.
        self._assign([p for group in self.param_groups for p in group["params"]])
        self._local = optimizer_cls([self._own(group) for group in self.param_groups], **kwargs)
        self.state = self._local.state
        self._take_options()

    @property
    def num_elements(self) -> list[int]:
        """Elements of the parameters that each rank owns."""
        return list(self._num_elements)

    @property
    def work(self) -> list[float]:
        """The sum of ``work`` over the parameters that each rank owns."""
        return list(self._work)

    def owner(self, parameter: Tensor) -> int:
        """The rank in the group that updates ``parameter``."""
        return self._owners[parameter]

    def owns(self, parameter: Tensor) -> bool:
        """Whether this rank updates ``parameter``."""
        return self._owners[parameter] == self._rank

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Share out a further group of parameters; all ranks call it together."""
        super().add_param_group(param_group)
        if self._local is not None:
            added = self.param_groups[-1]
            self._assign(added["params"])
            self._local.add_param_group(self._own(added))
            self._take_options()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Update this rank's parameters and send them; all ranks call it together.

        Returns what ``closure`` does.
        """
        assert self._local is not None, "made in __init__"
        self._require_buffers()
        self._give_options()
        # Some optimizers of others take no closure.
        loss = self._local.step(*(() if closure is None else (closure,)), **kwargs)
        self._take_options()
        if self._group is not None and self._num_ranks > 1:
            works = [
                dist.broadcast(buffer, group=self._group, group_src=owner, async_op=True)
                for owner, buffer in self._buffers
            ]
            for work in works:
                assert work is not None, "async_op returns a handle to members of the group"
                work.wait()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """The state of all parameters, as the optimizer would have it on one rank, on the CPU.

        All ranks call it together, and each receives it whole. It can be loaded on any number
        of ranks, and by ``optimizer_cls`` itself.
        """
        self._give_options()
        numbers = self._numbers()
        own = {
            numbers[parameter]: {name: _on_cpu(value) for name, value in state.items()}
            for parameter, state in self.state.items()
        }
        parts: list[Any] = [own]
        if self._group is not None and self._num_ranks > 1:
            parts = [None] * self._num_ranks
            dist.all_gather_object(parts, own, group=self._group)
        merged = {number: state for part in parts for number, state in part.items()}
        groups = [
            {**_options(group), "params": [numbers[p] for p in group["params"]]}
            for group in self.param_groups
        ]
        return {"state": dict(sorted(merged.items())), "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take this rank's share of a state that any number of ranks returned.

        Raises:
            ValueError: it is of other parameter groups.
        """
        assert self._local is not None, "made in __init__"
        saved = state_dict["param_groups"]
        sizes = [len(group["params"]) for group in self.param_groups]
        if [len(group["params"]) for group in saved] != sizes:
            raise ValueError(
                f"the state is of parameter groups of {[len(g['params']) for g in saved]} "
                f"parameters, and this optimizer has {sizes}"
            )
        state: dict[int, Any] = {}
        groups: list[dict[str, Any]] = []
        number = 0
        for group, old in zip(self.param_groups, saved, strict=True):
            mine = []
            for parameter, index in zip(group["params"], old["params"], strict=True):
                if self._owners[parameter] != self._rank:
                    continue
                if index in state_dict["state"]:
                    state[number] = state_dict["state"][index]
                mine.append(number)
                number += 1
            groups.append({**_options(old), "params": mine})
        self._local.load_state_dict({"state": state, "param_groups": groups})
        self.state = self._local.state
        self._take_options()

    def _assign(self, parameters: Sequence[Tensor]) -> None:
        """Give parameters an owner, the largest first."""
        for parameter in sorted(parameters, key=self._work_of, reverse=True):
            first = next(iter(self._owners), parameter)
            if parameter.device != first.device:
                raise ValueError(
                    f"a parameter of shape {tuple(parameter.shape)} is on {parameter.device} and "
                    f"others are on {first.device}: move all to the device of this rank"
                )
            origin = getattr(parameter, "origin", None)
            if origin is not None and origin.is_part:
                raise ValueError(
                    "ShardedOptimizer shares out whole parameters, and these are shards: use "
                    "optimizer_of_shards, or BucketedDDP for optimizers of whole matrices"
                )
            rank = self._work.index(min(self._work))
            self._owners[parameter] = rank
            self._work[rank] += self._work_of(parameter)
            self._num_elements[rank] += parameter.numel()
        if self._num_ranks > 1:
            self._pack(parameters)

    def _pack(self, parameters: Sequence[Tensor]) -> None:
        """Move parameters into one buffer for each owner and dtype, to be sent in one call."""
        together: dict[tuple[int, torch.dtype], list[Tensor]] = {}
        for parameter in parameters:
            together.setdefault((self._owners[parameter], parameter.dtype), []).append(parameter)
        for (owner, dtype), members in together.items():
            layout = FlatLayout(members)
            buffer = torch.zeros(layout.size, dtype=dtype, device=members[0].device)
            for member, view in zip(members, layout.views(buffer), strict=True):
                view.copy_(member.detach())
                member.data = view
                self._places[member] = view.data_ptr()
            self._buffers.append((owner, buffer))

    def _require_buffers(self) -> None:
        """What is sent are the buffers: parameters elsewhere would never arrive."""
        for parameter, place in self._places.items():
            if parameter.data_ptr() != place:
                raise RuntimeError(
                    f"ShardedOptimizer: a parameter, now of shape {tuple(parameter.shape)}, has "
                    "been moved, converted or sharded since the optimizer took it: make the "
                    "optimizer after that"
                )

    def _own(self, group: dict[str, Any]) -> dict[str, Any]:
        """The group with this rank's parameters alone, which may be none."""
        mine = [p for p in group["params"] if self._owners[p] == self._rank]
        return {**_options(group), "params": mine}

    def _give_options(self) -> None:
        """Pass on changes of ``param_groups``, such as a schedule's, to the local optimizer."""
        assert self._local is not None, "made in __init__"
        for group, local in zip(self.param_groups, self._local.param_groups, strict=True):
            local.update(_options(group))

    def _take_options(self) -> None:
        """Show defaults and changes of the local optimizer in ``param_groups``."""
        assert self._local is not None, "made in __init__"
        for group, local in zip(self.param_groups, self._local.param_groups, strict=True):
            group.update(_options(local))

    def _numbers(self) -> dict[Tensor, int]:
        """Parameters by their number in PyTorch's state dicts."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        return {parameter: number for number, parameter in enumerate(parameters)}


def newton_schulz_flops(parameter: Tensor) -> float:
    """FLOPs of a Newton-Schulz iteration a X + (b X X^T + c (X X^T)^2) X on a matrix.

    4 m^2 n + 2 m^3 with m rows and n >= m columns; a parameter that is no matrix costs its
    elements.
    """
    if parameter.dim() != 2:
        return float(parameter.numel())
    m, n = sorted(parameter.shape)
    return 4.0 * m * m * n + 2.0 * m**3


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _on_cpu(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, Tensor) else value
