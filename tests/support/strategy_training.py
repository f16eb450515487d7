"""Training by ``parallel=`` choices: small cases, and their weights after some steps."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from harness.cases.case import Case
from harness.request.compose import compose_request
from harness.tasks.batch import whole_batch
from kernels import BACKENDS
from models.transformer import Transformer, cross_entropy
from parallel.data import FSDP, Zero1, Zero2

CPU = torch.device("cpu")

CASE = (
    *("model=tiny", "model.num_layers=2", "model.d_model=32", "model.d_ff=48"),
    *("model.num_heads=4", "model.vocab_size=23", "batch_size=2", "seq_len=12", "device=cpu"),
    *("attention=naive",),
)


def case_of(*arguments: str) -> Case:
    (case,) = compose_request([*CASE, *arguments]).cases
    return case


def train_case(case: Case, first_batch: int, num_batches: int) -> list[Tensor]:
    """Weights of the transformer after AdamW steps through the strategy."""
    assert case.model is not None
    torch.manual_seed(5)
    naive = BACKENDS["naive"].target(name="naive")
    module = Transformer(case.model, naive, variant=case.attention_variant)
    model = case.parallel.wrap(module)
    optimizer = case.parallel.optimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
    for _ in range(3):
        for index in range(first_batch, first_batch + num_batches):
            batch = whole_batch(case, CPU, index)
            logits = model(batch.tokens, batch.positions)
            (cross_entropy(logits, batch.targets) / num_batches).backward()
        case.parallel.after_backward(model)
        optimizer.step()
        optimizer.zero_grad()
    return weights_of(model, module)


def weights_of(model: nn.Module, module: nn.Module) -> list[Tensor]:
    """Whole parameters of a module that a strategy has wrapped."""
    if isinstance(model, FSDP):
        whole = dict(model.whole_parameters())
        return [whole[name].detach().clone() for name, _ in module.named_parameters()]
    if isinstance(model, Zero1 | Zero2):
        model.wait_for_parameters()
    found = [p.detach() for p in module.parameters()]
    return [p.full_tensor() if isinstance(p, DTensor) else p.clone() for p in found]


def train_case_on_rank(group: dist.ProcessGroup, case: Case) -> list[Tensor]:
    return train_case(case, dist.get_rank(), 1)
