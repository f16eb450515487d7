"""Finds the blocks of a model: modules whose weights are gathered, awaited and freed together."""

from __future__ import annotations

from collections.abc import Iterator

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
