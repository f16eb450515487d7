"""Finds the blocks of a model: modules whose weights are gathered, awaited and freed together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """The entries of the outermost ModuleLists and Sequentials that have parameters.

    A transformer's are its layers. The order in which they are registered is taken for the order
    in which they run.
    """
    entries = dict.fromkeys(_entries(module))
    return [block for block in entries if any(True for _ in block.parameters())]


def _entries(module: nn.Module) -> Iterator[nn.Module]:
    listed = isinstance(module, nn.ModuleList | nn.Sequential)
    for child in module.children():
        # A list is never called itself.
        if listed and not isinstance(child, nn.ModuleList):
            yield child
        else:
            yield from _entries(child)


def waiting_points(module: nn.Module) -> Iterator[tuple[nn.Module, list[nn.Parameter]]]:
    """(module, parameters) that must be gathered before the forward pass of the module.

    Blocks with all their parameters, since a block may use a parameter of a layer without
    calling the layer; outside of blocks, every module with parameters of its own.
    """
    inside: set[nn.Module] = set()
    for block in blocks_of(module):
        inside.update(block.modules())
        yield block, list(block.parameters())
    for other in module.modules():
        own = list(other.parameters(recurse=False))
        if own and other not in inside:
            yield other, own


def parameters_of_blocks(
    module: nn.Module, blocks: Sequence[nn.Module]
) -> tuple[list[list[nn.Parameter]], list[nn.Parameter]]:
    """The parameters that each block alone uses, and all others of the module.

    Raises:
        ValueError: a block is not in the module, or is in another one.
    """
    known = set(module.modules())
    users: dict[nn.Parameter, set[int]] = {}
    outside_of_blocks = -1
    for number, block in enumerate(blocks):
        if block not in known:
            raise ValueError(f"blocks[{number}] is not in the module: give modules inside it")
        inner = set(block.modules())
        nested = [other for other, b in enumerate(blocks) if b in inner and other != number]
        if nested:
            raise ValueError(
                f"blocks[{nested[0]}] is in blocks[{number}]: give blocks that lie side by side"
            )
        for parameter in block.parameters():
            users.setdefault(parameter, set()).add(number)
    in_blocks = {inner for block in blocks for inner in block.modules()}
    for other in known - in_blocks:
        for parameter in other.parameters(recurse=False):
            users.setdefault(parameter, set()).add(outside_of_blocks)
    inside: list[list[nn.Parameter]] = [[] for _ in blocks]
    outside: list[nn.Parameter] = []
    # In the module's order, which is the same on all ranks.
    for parameter in module.parameters():
        owners = users[parameter]
        alone = len(owners) == 1 and outside_of_blocks not in owners
        (inside[min(owners)] if alone else outside).append(parameter)
    return inside, outside
