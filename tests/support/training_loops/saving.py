"""Loops that save and load."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
import torch.distributed as dist
from data_parallel_training import Plain

from parallel.checkpoints import load_checkpoint, save_checkpoint
from training_loops.trainer import CONTAINERS, Trainer, Weights, descend, loop


@loop("saving, and loading into a new model")
def saving(trainer: Trainer) -> Weights:
    first = trainer.model(Plain)
    trainer.steps(first, descend)
    state = copy.deepcopy(first.state_dict())
    second = trainer.model(Plain)
    second.load_state_dict(state)
    return trainer.steps(second, descend)


RESHARDED = "`save_checkpoint` on four ranks, `load_checkpoint` on two and on one"
"""A loop that takes several groups of ranks, and so stands in no function here."""


def save_on_rank(group: dist.ProcessGroup, container: str, folder: Path) -> None:
    """Two steps, and a checkpoint of them."""
    trainer = Trainer(wrap=CONTAINERS[container], group=group)
    model = trainer.model(Plain)
    optimizer = trainer.sgd(model.parameters())
    for batch in list(trainer.batches())[:2]:
        trainer.step(model, batch, optimizer)
    save_checkpoint(folder, model, optimizer, group=group)


def load_on_rank(group: dist.ProcessGroup, container: str, folder: Path) -> Weights:
    """The steps after a checkpoint, from other weights and with a new optimizer."""
    trainer = Trainer(wrap=CONTAINERS[container], group=group)
    model = trainer.model(Plain)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    optimizer = trainer.sgd(model.parameters())
    load_checkpoint(folder, model, optimizer, group=group)
    for batch in list(trainer.batches())[2:]:
        trainer.step(model, batch, optimizer)
    return trainer.weights(model)
