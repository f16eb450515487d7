"""Gives memory and values to a module built on the meta device, some parameters at a time.

    with torch.device("meta"):
        module = Transformer(...)
    model = FSDP(module)

A model that fits no device whole can be made so: FSDP has memory for one unit of parameters,
initialises the modules that own them, keeps its shards, and goes on to the next.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

Initialise = Callable[[nn.Module], Any]


def is_on_meta(module: nn.Module) -> bool:
    return any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))


def default_device(group: dist.ProcessGroup | None) -> torch.device:
    """This rank's device, by what its process group communicates with."""
    if group is not None and dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


class Materialiser:
    """Replaces meta tensors: buffers have memory from here on, parameters when it is their turn.

    Args:
        initialise: gives a module's own parameters and buffers their values, once they have
            memory; ``module.reset_parameters()`` if None.

    Memory begins as values that mark it as not initialised, for :meth:`require_values` to find.

    Raises:
        ValueError: a module with tensors on the meta device has no ``reset_parameters``.
    """

    def __init__(
        self, module: nn.Module, device: torch.device, initialise: Initialise | None
    ) -> None:
        self._initialise = initialise or reset_parameters
        self._waiting: list[nn.Module] = []
        """Modules that are not initialised, in the module's order."""
        self._hollow: set[Tensor] = set()
        """Parameters that have no memory yet."""
        self._buffers: list[tuple[nn.Module, str]] = []
        """Those that were on the meta device: a module and a name, since values may replace one."""
        self._names = {p: name for name, p in module.named_parameters()}
        self._paths = {inner: path for path, inner in module.named_modules()}
        for name, inner in module.named_modules():
            own = (*inner.parameters(recurse=False), *inner.buffers(recurse=False))
            if any(tensor.is_meta for tensor in own):
                if initialise is None and not hasattr(inner, "reset_parameters"):
                    raise ValueError(
                        f"{name or 'the module'} ({type(inner).__name__}) is on the meta device "
                        "and has no reset_parameters(): give init_fn=, which is called with each "
                        "such module"
                    )
                self._waiting.append(inner)
        made: dict[Tensor, Tensor] = {}
        for inner in self._waiting:
            for name, parameter in inner._parameters.items():
                if parameter is not None and parameter.is_meta:
                    # One for all modules that share it.
                    if parameter not in made:
                        made[parameter] = _without_memory(parameter, device)
                        self._names[made[parameter]] = self._names[parameter]
                    inner._parameters[name] = made[parameter]
            for name, buffer in inner._buffers.items():
                if buffer is not None and buffer.is_meta:
                    inner._buffers[name] = torch.empty_like(buffer, device=device)
                    mark_memory(inner._buffers[name])
                    self._buffers.append((inner, name))
        self._hollow.update(made.values())

    @property
    def buffers(self) -> list[Tensor]:
        """Those that were on the meta device."""
        found = [inner._buffers[name] for inner, name in self._buffers]
        return [buffer for buffer in found if buffer is not None]

    def require_values(self, parameters: Sequence[nn.Parameter]) -> None:
        """Raise ValueError where one of ``parameters`` is memory that nobody has written to.

        Asked once they are broadcast, since the first rank's values count, on all ranks alike.
        """
        for parameter in parameters:
            _require_value(parameter, self._names[parameter])

    def require_values_of_buffers(self) -> None:
        """The same for buffers."""
        for inner, name in self._buffers:
            buffer = inner._buffers[name]
            if buffer is not None:
                _require_value(buffer, ".".join(filter(None, (self._paths[inner], name))))

    def fill(self, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """Give values to ``parameters``, and to others of the modules that own them.

        Returns:
            Those of ``parameters`` that were on the meta device.
        """
        wanted = set(parameters)
        own = [m for m in self._waiting if wanted.intersection(m.parameters(recurse=False))]
        found = [parameter for parameter in parameters if parameter in self._hollow]
        self._fill(own)
        self._hollow.difference_update(found)
        return found

    def fill_rest(self) -> None:
        """Initialise the modules that no parameter belongs to."""
        self._fill(list(self._waiting))

    def _fill(self, modules: Iterable[nn.Module]) -> None:
        for module in modules:
            self._waiting.remove(module)
            for parameter in module.parameters(recurse=False):
                storage = parameter.untyped_storage()
                if parameter in self._hollow and storage.nbytes() == 0:
                    storage.resize_(parameter.numel() * parameter.element_size())
                    mark_memory(parameter.detach())
            with torch.no_grad():
                self._initialise(module)


def reset_parameters(module: nn.Module) -> None:
    module.reset_parameters()


def mark_memory(tensor: Tensor) -> None:
    """Fill a tensor with what no initialisation gives: NaN, or the largest integer."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(math.nan)
    else:
        tensor.fill_(True if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).max)


def _is_marked(tensor: Tensor) -> bool:
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.isnan().any())
    # A buffer of booleans may well be all true.
    is_integer = tensor.dtype != torch.bool and tensor.numel() > 0
    return is_integer and bool((tensor == torch.iinfo(tensor.dtype).max).all())


def _require_value(tensor: Tensor, name: str) -> None:
    if _is_marked(tensor.detach()):
        raise ValueError(
            f"{name} comes from the meta device and was not initialised, or with NaN: let "
            "reset_parameters() of its module, or init_fn, write all parameters and buffers"
        )


def _without_memory(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    """A parameter of the same shape and strides whose memory is still to come."""
    made = nn.Parameter(
        torch.empty_like(parameter, device=device), requires_grad=parameter.requires_grad
    )
    made.untyped_storage().resize_(0)
    return made
