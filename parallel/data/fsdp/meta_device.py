"""Gives memory and values to a module built on the meta device, some parameters at a time.

    with torch.device("meta"):
        module = Transformer(...)
    model = FSDP(module)

A model that fits no device whole can be made so: FSDP has memory for one unit of parameters,
initialises the modules that own them, keeps its shards, and goes on to the next.
"""

from __future__ import annotations

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
        self.buffers: list[Tensor] = []
        """Those that were on the meta device."""
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
                    inner._parameters[name] = made[parameter]
            for name, buffer in inner._buffers.items():
                if buffer is not None and buffer.is_meta:
                    inner._buffers[name] = torch.empty_like(buffer, device=device)
                    self.buffers.append(inner._buffers[name])
        self._hollow.update(made.values())

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
            with torch.no_grad():
                self._initialise(module)


def reset_parameters(module: nn.Module) -> None:
    module.reset_parameters()


def _without_memory(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    """A parameter of the same shape and strides whose memory is still to come."""
    made = nn.Parameter(
        torch.empty_like(parameter, device=device), requires_grad=parameter.requires_grad
    )
    made.untyped_storage().resize_(0)
    return made
