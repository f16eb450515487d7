"""The numeric check of a strategy: some steps of a small model against one process.

The small model has the case's head_dim, precision and checkpointing, two layers, and as many heads
as its ranks can share; gradients and weights travel in units so small that there are several. All
ranks take steps with batches that differ from rank to rank and from step to step. The learning
rate, the weight decay and AdamW's eps are so large that a wrong scale of gradients, a wrong count
of steps or a wrong decay moves the weights by more than roundings do. Weights that two modules
share are checked in a second training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from harness.bench.bench import Bench
from harness.bench.outcome import WrongResult
from harness.cases.case import Case
from harness.cases.compilation import Compile
from harness.gate.findings import worst
from harness.gate.tolerances import ROUNDOFF, format_of
from harness.gate.updates import Training, check_training
from harness.measure import check, passes, plain_attention
from harness.tasks import batch
from harness.tasks.training import step as training_step
from harness.tasks.training.clipping import unscale_and_clip
from kernels import Attention, AttentionBackend
from models.config import ModelConfig
from models.layers import CoreAttention
from models.transformer import Transformer, cross_entropy
from parallel.context.blocks.layouts import Layout
from parallel.strategies.strategy import Strategy
from parallel.tensor import whole_parameters

STEPS = 4

OPTIONS: dict[str, Any] = {"lr": 0.01, "weight_decay": 1.0, "eps": 1e-3, "fused": True}
"""Of AdamW."""

UNITS = 4
"""Buckets, or the like, that the small model's gradients fill about."""

MAX_NORM = 0.1
"""Of clipped gradients; below the norm of every step's."""

LOSS_SCALE = 256.0
"""Of float16 gradients; so small that no step is skipped."""

DTYPE_BYTES = 4


def check_strategy(
    case: Case,
    bench: Bench,
    attention: CoreAttention,
    layout: Layout | None,
    *,
    draw: int,
) -> None:
    """Train a small model by the case's strategy and in one process, and compare the two.

    All ranks call it together.

    Args:
        attention: as the measured model attends, bound to ranks that share sequences.
        layout: how they share them; None where they do not.
        draw: which weights and batches: a number of its own for every check of a case.

    Raises WrongResult for an error beyond its tolerance.
    """
    bench.stage("checking")
    small = small_case(case, draw)
    names = (case.precision.peak, case.parallel.exchange_dtype or case.precision.peak)
    number_format = format_of(max(names, key=ROUNDOFF.__getitem__))
    for ties in (False, True):
        trained = _Trained(small, bench, attention, layout, ties=ties)
        got = trained.by_strategy()
        with check.one_thread():
            exact, careful = trained.in_one_process(exact=True), trained.in_one_process(exact=False)
            found = worst(check_training(got, exact, careful, trained.start, number_format))
        check.note(case, bench, found, factor=number_format.factor)
    if bench.device.type == "cuda":
        torch.cuda.empty_cache()


def check_replicas(case: Case, bench: Bench, model: nn.Module, module: nn.Module) -> None:
    """Hold the measured model's weights on all ranks to each other, and to be finite.

    Ranks whose strategy keeps whole parameters hold the same bits, since each has applied the same
    averages. All ranks call it together. Raises WrongResult.

    Args:
        model: as the strategy wrapped ``module``.
    """
    bench.stage("checking")
    # Between steps the parameters of some are the rank's shards.
    make_whole = getattr(model, "wait_for_parameters", None)
    if make_whole is not None:
        make_whole()
    wrong = ""
    group = case.parallel.data_group()
    compares = case.parallel.parameter_share == 1 and case.parallel.data_ranks > 1
    for name, parameter in module.named_parameters():
        own = _local(parameter.detach())
        if not wrong and not bool(torch.isfinite(own).all()):
            wrong = f"{name} has elements that are not finite after the measured steps"
        if compares:
            first = own.clone(memory_format=torch.contiguous_format)
            torch.distributed.broadcast(first, group=group, group_src=0)
            if not wrong and not torch.equal(first, own):
                off = float((first.double() - own.double()).norm() / first.double().norm())
                wrong = (
                    f"{name} differs by {off:.2g} from that of the first rank with the same "
                    "weights after the measured steps; both have applied the same gradients"
                )
    if wrong:
        raise WrongResult(wrong)
    bench.vote()


def small_case(case: Case, draw: int) -> Case:
    """The case with a model, a batch and sequences that take next to no time."""
    assert case.model is not None, "a strategy trains a model"
    parallel, model = case.parallel, small_model(case.model, case.parallel.tp * case.parallel.cp)
    checkpoint = case.checkpoint
    if checkpoint is not None and checkpoint.blocks > model.num_layers:
        checkpoint = replace(checkpoint, every=model.num_layers)
    seq_len = 32 * parallel.tp * parallel.cp
    parameters = 2 * model.vocab_size * model.d_model + model.num_layers * model.d_model * (
        2 * model.d_model + 2 * model.kv_heads * model.head_dim + 3 * model.d_ff
    )
    unit_bytes = DTYPE_BYTES * parameters // parallel.tp // UNITS
    return replace(
        case,
        attention=_small_attention(case.attention, seq_len),
        model=model,
        parallel=parallel.in_units_of(unit_bytes),
        batch_size=2,
        seq_len=seq_len,
        seed=case.seed + 1000 * (draw + 1),
        checkpoint=checkpoint,
        compile=Compile(),
        profile=None,
    )


def _small_attention(attention: AttentionBackend, seq_len: int) -> AttentionBackend:
    """The attention with a window or a prefix that hides keys of short sequences too."""
    if not isinstance(attention, Attention):
        return attention
    window = attention.window
    return replace(
        attention,
        window=None if window is None else min(window, seq_len // 4),
        prefix_len=min(attention.prefix_len, seq_len // 4),
    )


def small_model(model: ModelConfig, ranks: int) -> ModelConfig:
    """A model of two layers with the head_dim of this one, and heads for so many ranks."""
    kv_heads = ranks if model.kv_heads % ranks == 0 else model.kv_heads
    heads = kv_heads * min(2, model.num_heads // model.kv_heads)
    width = heads * model.head_dim
    return replace(
        model,
        vocab_size=128 * ranks,
        d_model=width,
        d_ff=2 * width,
        num_layers=2,
        num_heads=heads,
        num_kv_heads=kv_heads,
        full_attention_every=None if model.full_attention_every is None else 2,
    )


@dataclass(kw_only=True, slots=True, frozen=True)
class _Sum:
    """What one backward pass computes: a batch's loss, and its share of the step's."""

    batch: batch.Batch
    share: float


class _Trained:
    """One small model, to be trained by a strategy and in one process."""

    def __init__(
        self,
        case: Case,
        bench: Bench,
        attention: CoreAttention,
        layout: Layout | None,
        *,
        ties: bool,
    ) -> None:
        self._case, self._bench, self._attention, self._layout = case, bench, attention, layout
        self._ties = ties
        self._clips = getattr(case.task, "clip_grad_norm", None) is not None
        self._dtype = getattr(torch, case.precision.parameters)
        whole = self._whole_model()
        self.start = {name: x.detach().clone() for name, x in whole.named_parameters()}

    def _whole_model(self) -> Transformer:
        assert self._case.model is not None
        torch.manual_seed(self._case.seed)
        attention = plain_attention.PlainAttention()
        model = Transformer(
            self._case.model,
            attention,
            variant=self._case.attention_variant,
            device=self._bench.device,
            dtype=self._dtype,
        )
        return self._tied(model, scale=model.config.d_model**-0.5)

    def _tied(self, model: Transformer, *, scale: float = 1.0) -> Transformer:
        if self._ties:
            model.head.weight = model.embedding.weight
            # As large as a head's weights: an embedding's own gradient would hardly show.
            with torch.no_grad():
                model.head.weight *= scale
        return model

    def by_strategy(self) -> Training:
        """As the measured steps are taken; whole weights, as this rank has them in the end."""
        case = self._case
        torch.manual_seed(case.seed)
        model = training_step.build_model(case, self._attention, self._bench.device)
        model = self._tied(model, scale=model.config.d_model**-0.5)
        wrapped = case.parallel.wrap(model)
        optimizer = case.parallel.optimizer(wrapped.parameters(), torch.optim.AdamW, **OPTIONS)
        scaler = case.parallel.grad_scaler(case.device, enabled=case.precision.grad_scaler)
        losses = self._train(
            wrapped,
            optimizer,
            scaler,
            lambda number: [_Sum(batch=self._own_batch(number), share=1.0)],
            loss_of=training_step.loss_function(case),
            strategy=case.parallel,
        )
        case.parallel.finish(wrapped)
        whole = _whole_weights(wrapped, case)
        by_rank = self._bench.gather(losses)
        return Training(
            losses=[sum(of_step) / len(by_rank) for of_step in zip(*by_rank, strict=True)],
            # A state dict may be whole in the CPU's memory alone.
            weights={name: whole[name].to(self._bench.device) for name in self.start},
        )

    def in_one_process(self, *, exact: bool) -> Training:
        """On the batches of all ranks, in float64 or in the case's number formats."""
        case, model = self._case, self._whole_model()
        if exact:
            model = self._tied(model.double())
        scaler = torch.amp.GradScaler(case.device, enabled=case.precision.grad_scaler and not exact)
        rounds_to = None if exact else case.parallel.exchange_dtype
        losses = self._train(
            model if rounds_to is None else _Rounded(model, getattr(torch, rounds_to)),
            torch.optim.AdamW(model.parameters(), **OPTIONS),
            scaler,
            self._whole_batch if exact else self._batches_of_all,
            loss_of=cross_entropy,
            autocasts=not exact,
        )
        return Training(
            losses=losses, weights={name: x.detach() for name, x in model.named_parameters()}
        )

    def _train(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler,
        batches: Callable[[int], list[_Sum]],
        *,
        loss_of: Callable[[Tensor, Tensor, float | None], Tensor],
        strategy: Strategy | None = None,
        autocasts: bool = True,
    ) -> list[float]:
        """The loss of each step."""
        _set_scale(scaler)
        losses = []
        for number in range(STEPS):
            total = 0.0
            for part in batches(number):
                with passes.autocast(self._case) if autocasts else nullcontext():
                    logits = model(part.batch.tokens, part.batch.positions)
                    loss = loss_of(logits, part.batch.targets, part.batch.num_targets) * part.share
                if strategy is not None:
                    # A rank that has failed meets the others here, and not in the exchange.
                    self._bench.vote()
                scaler.scale(loss).backward()
                total += float(loss.detach())
            if strategy is not None:
                strategy.after_backward(model)
            if self._clips:
                unscale_and_clip(scaler, optimizer, model, MAX_NORM, strategy)
            scaler.step(optimizer)
            scaler.update()
            model.zero_grad(set_to_none=True)
            losses.append(total)
        return losses

    def _own_batch(self, number: int) -> batch.Batch:
        rank = self._case.parallel.data_rank(self._bench.rank)
        case, device = self._of_step(number), self._bench.device
        if self._layout is None:
            return batch.whole_batch(case, device, rank)
        return batch.split_batch(case, device, rank, self._layout)

    def _batches_of_all(self, number: int) -> list[_Sum]:
        case, replicas = self._of_step(number), self._case.parallel.dp
        return [
            _Sum(batch=batch.whole_batch(case, self._bench.device, rank), share=1 / replicas)
            for rank in range(replicas)
        ]

    def _whole_batch(self, number: int) -> list[_Sum]:
        """The batches of all replicas as one."""
        parts = [part.batch for part in self._batches_of_all(number)]
        whole = batch.Batch(
            tokens=torch.cat([part.tokens for part in parts]),
            targets=torch.cat([part.targets for part in parts]),
            positions=parts[0].positions,
        )
        return [_Sum(batch=whole, share=1.0)]

    def _of_step(self, number: int) -> Case:
        return replace(self._case, seed=self._case.seed + 100 * (number + 1))


class _Rounded(nn.Module):
    """A model that computes with its weights rounded to a dtype, in that dtype."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.model, self._dtype = model, dtype

    def forward(self, *inputs: Tensor) -> Any:
        weights = {name: x.to(self._dtype) for name, x in self.model.named_parameters()}
        return torch.func.functional_call(self.model, weights, inputs)


def _set_scale(scaler: torch.amp.GradScaler) -> None:
    if scaler.is_enabled():
        scaler.load_state_dict({**scaler.state_dict(), "scale": LOSS_SCALE})


def _whole_weights(model: nn.Module, case: Case) -> dict[str, Tensor]:
    """Every parameter as one process has it, by name; all ranks call it together."""
    own = dict(_gathered(model))
    if case.parallel.tp == 1:
        return own
    return whole_parameters(own.items(), case.parallel.tp_mesh())


def _gathered(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """A tensor-parallel rank's part of each parameter, whole over the data ranks."""
    for name, value in model.state_dict().items():
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        yield name.removeprefix("module."), whole.detach()


def _local(parameter: Tensor) -> Tensor:
    own: Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return own
