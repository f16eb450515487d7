"""One training step of the transformer: forward, backward, optimizer, timed apart.

The CS336 text's benchmarking_script problem. The forward phase includes the loss; the whole
step is timed by the host clock, synchronised at its end, and so includes launch overhead.

On several ranks steps follow each other without a pause and are timed from beginning to
beginning, since a strategy may leave to the next step what hides behind it. The end of backward
is a phase of its own too where the strategy has one: communication, from when this rank has its
gradients until it has their averages. Besides, memory is noted in a first step, and what ranks
send, and when, in steps after the measured ones.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import kernels
from harness.cases.case import Case, require_at_least, require_choice
from harness.cases.column import CaseColumn, note
from harness.cases.task import Task, Work, task
from harness.predictions.training import footprint, sent_bytes, step_memory, traffic_bytes
from kernels import AttentionProblem
from kernels.ranges import named_range
from models import accounting
from models.config import ModelConfig
from models.memory import MemoryPrediction
from parallel.context.attention import SequenceParallelAttention

if TYPE_CHECKING:
    import torch
    from torch import nn

    from harness.bench.bench import Bench, PhaseTimer
    from harness.measure.attention_calls import AttentionCall
    from harness.tasks.training.batch import Batch
    from models.layers import Attention

MODES = ("forward", "forward_backward", "train_step")


@task("train_step")
@dataclass(kw_only=True, slots=True)
class TrainStep(Task):
    """A step of AdamW on random tokens. Phases: forward, backward, optimizer, and step."""

    mode: str = "train_step"
    """``forward`` without gradients, ``forward_backward``, or the whole ``train_step``."""
    warmup_steps: int = 5
    """Untimed steps before measuring."""
    measure_steps: int = 10
    """Timed steps."""

    uses: ClassVar[frozenset[str]] = frozenset({"model", "compile", "checkpoint", "profile"})
    profiled_phases: ClassVar[tuple[str, ...]] = ("forward", "backward", "optimizer")
    expected_phase: ClassVar[str] = "step"
    columns: ClassVar[tuple[CaseColumn, ...]] = (CaseColumn(name="traffic", read=note("traffic")),)

    def validate(self, case: Case) -> None:
        require_choice("task.mode", self.mode, MODES)
        require_at_least("task.warmup_steps", self.warmup_steps, 0)
        require_at_least("task.measure_steps", self.measure_steps, 1)
        _require_divisible(case)
        if case.checkpoint is not None and self.mode == "forward":
            raise ValueError(
                f"checkpoint={case.checkpoint.scope}: task.mode=forward keeps no activations that "
                "could be computed again; leave it out"
            )
        if case.checkpoint is not None and case.checkpoint.blocks > _model(case).num_layers:
            raise ValueError(
                f"checkpoint.every={case.checkpoint.every}: checkpoints no block of "
                f"model.num_layers={_model(case).num_layers}; must be at most that"
            )

    def num_passes(self) -> int:
        return self.warmup_steps + self.measure_steps

    def attention_problem(self, case: Case) -> AttentionProblem:
        model = _model(case)
        return AttentionProblem(
            batch_size=case.batch_size,
            num_heads=model.num_heads // case.parallel.tp,
            num_kv_heads=model.kv_heads // case.parallel.tp,
            q_len=case.seq_len,
            kv_len=case.seq_len,
            head_dim=model.head_dim,
            dtype=case.precision.compute,
            device=case.device,
            causal=True,
            needs_grad=self.mode != "forward",
            cp=case.parallel.cp,
        )

    def work(self, case: Case) -> dict[str, Work]:
        # Ranks share a sequence's tokens (cp), and every matmul and head (tp), in equal parts.
        ranks = case.parallel.cp * case.parallel.tp
        forward = accounting.forward_flops(_model(case), case.batch_size, case.seq_len) / ranks
        backward = accounting.backward_flops(_model(case), case.batch_size, case.seq_len) / ranks
        tokens = case.batch_size * case.seq_len // ranks
        phases = {"forward": Work(flops=forward, tokens=tokens)}
        total = forward
        sent = sent_bytes(traffic_bytes(case), case.parallel.data_ranks)
        if self.mode != "forward":
            phases["backward"] = Work(flops=backward)
            total += backward
            if case.parallel.synchronizes_after_backward:
                phases["communication"] = Work(flops=0.0)
        if self.mode == "train_step":
            phases["optimizer"] = Work(flops=0.0)
        phases["step"] = Work(flops=total, tokens=tokens, sent_bytes=sent or None)
        return phases

    def predicted_memory(self, case: Case) -> dict[str, float]:
        return footprint(case).peak_parts()

    def predicted_step_memory(self, case: Case) -> MemoryPrediction:
        return step_memory(case)

    def run(self, case: Case, bench: Bench) -> None:
        from harness.measure.attention_calls import DenseCall
        from harness.measure.split_call import SplitCall
        from harness.tasks.training.batch import split_batch, whole_batch

        # Ranks that share weights train on the same tokens.
        rank = case.parallel.data_rank(bench.rank)
        if case.parallel.cp == 1:
            call = DenseCall(case, bench.device, sequence_major=True)
            make_batch = partial(whole_batch, case, bench.device, rank)
            self._run(case, bench, call, case.attention.role(kernels.Attention), make_batch)
            return
        scheme = case.attention.role(SequenceParallelAttention)
        with scheme.bind(case.parallel.cp_group(), bench.device) as attention:
            split = SplitCall(case, bench.device, attention)
            if split.padding:
                bench.outcome.notes["padding_tokens"] = split.padding
            make_batch = partial(split_batch, case, bench.device, rank, attention.layout)
            self._run(case, bench, split, attention, make_batch)

    def _run(
        self,
        case: Case,
        bench: Bench,
        call: AttentionCall,
        attention: Attention,
        make_batch: Callable[[], Batch],
    ) -> None:
        """Check the attention call, then measure steps of a model that attends by it."""
        import torch

        from harness.bench.bench import WrongResult
        from harness.bench.program import Program
        from harness.bench.step_memory import MemoryNotes, note_first_step
        from harness.bench.step_trace import note_timeline
        from harness.bench.step_traffic import note_traffic
        from harness.measure.check import check_call
        from harness.measure.passes import autocast

        check_call(case, bench, call)
        bench.vote()

        bench.stage("set-up")
        trains = self.mode != "forward"
        bench.release_memory()
        baseline = bench.allocated_bytes()
        torch.manual_seed(case.seed)
        module = _build_model(case, attention, bench.device)
        bench.vote()
        model = case.parallel.wrap(module)
        loss_of = _loss(case)
        optimizer = None
        if self.mode == "train_step":
            optimizer = case.parallel.optimizer(
                model.parameters(), torch.optim.AdamW, lr=1e-4, fused=True
            )
        scaler = case.parallel.grad_scaler(case.device, enabled=case.precision.grad_scaler)
        batch = make_batch()
        uses_cuda_graphs = case.compile is not None and case.compile.mode in (
            "reduce-overhead",
            "max-autotune",
        )
        last_loss: torch.Tensor | None = None
        together = case.world_size > 1
        synchronizes = case.parallel.synchronizes_after_backward

        def step(timer: PhaseTimer) -> None:
            nonlocal last_loss
            if uses_cuda_graphs:
                torch.compiler.cudagraph_mark_step_begin()
            with timer.phase("forward"), torch.set_grad_enabled(trains), autocast(case):
                logits = model(batch.tokens, batch.positions)
                with named_range("loss"):
                    loss = loss_of(logits, batch.targets, batch.num_targets)
                # Else they would stay for the backward pass, which needs them no more.
                del logits
            last_loss = loss.detach()
            if trains:
                with timer.phase("backward"):
                    scaler.scale(loss).backward()
                    with timer.phase("communication") if synchronizes else nullcontext():
                        case.parallel.after_backward(model)
            if optimizer is not None:
                with timer.phase("optimizer"):
                    scaler.step(optimizer)
                    scaler.update()
            model.zero_grad(set_to_none=True)

        # Without warm-up nothing may run before what is measured.
        warmup = self.warmup_steps
        if together and trains and warmup:
            note_first_step(bench, step, MemoryNotes(bench, model, optimizer, baseline))
            warmup -= 1
        bench.measure(
            step,
            warmup=warmup,
            passes=self.measure_steps,
            whole_step="step",
            in_a_row=together,
        )
        assert last_loss is not None
        losses = bench.gather(float(last_loss))
        # Ranks that share sequences have parts of one loss, and others have losses of their own.
        loss = sum(losses) / len(losses)
        bench.outcome.notes["loss"] = loss
        if not abs(loss) < float("inf"):
            raise WrongResult(f"the loss of the last step is {loss}")
        # What follows takes steps of its own.
        finish = partial(case.parallel.finish, model)

        def finished_step(timer: PhaseTimer) -> None:
            # A profiler that stops while gloo still works would take the process along.
            step(timer)
            finish()

        if case.profile is not None and bench.in_last_round:
            program = Program(step=finished_step, model=module, wrapped=model, optimizer=optimizer)
            case.profile.run(case, bench, program)
        if together and trains and bench.in_last_round:
            note_traffic(bench, step)
            note_timeline(bench, step, finish)
        finish()


def _model(case: Case) -> ModelConfig:
    assert case.model is not None, "train_step uses a model"
    return case.model


def _require_divisible(case: Case) -> None:
    """Raise ValueError, naming the key, unless parallel.tp ranks can share what they split."""
    tp, model = case.parallel.tp, _model(case)
    sizes = {
        "model.num_heads": model.num_heads,
        "model.num_kv_heads": model.kv_heads,
        "model.d_ff": model.d_ff,
        "model.vocab_size": model.vocab_size,
    }
    for key, size in sizes.items():
        if size % tp:
            raise ValueError(f"parallel.tp={tp}: must divide {key}={size} of model={model.name}")
    tokens, held = case.seq_len, f"seq_len={case.seq_len}"
    if isinstance(case.attention, SequenceParallelAttention) and case.parallel.cp > 1:
        tokens = case.attention.layout(case.parallel.cp).local_len(case.seq_len)
        held += f", of which each of parallel.cp={case.parallel.cp} ranks holds {tokens} tokens"
    if tokens % tp:
        raise ValueError(f"parallel.tp={tp}: must divide {held}: between layers ranks share them")


def _loss(case: Case) -> Callable[[torch.Tensor, torch.Tensor, float | None], torch.Tensor]:
    """Of logits, targets and the number of targets; logits may be split over the vocabulary."""
    from models.transformer import cross_entropy
    from parallel.tensor import vocab_parallel_cross_entropy

    if case.parallel.tp == 1:
        return cross_entropy
    return partial(vocab_parallel_cross_entropy, mesh=case.parallel.tp_mesh())


def _build_model(case: Case, attention: Attention, device: torch.device) -> nn.Module:
    """The transformer, or this rank's part of it, on its device, compiled as the case asks."""
    import torch

    from models.transformer import Transformer
    from parallel.tensor import split_transformer

    dtype = getattr(torch, case.precision.parameters)
    splits = case.parallel.tp > 1
    # To be split it is made without memory: on one device there may be none for the whole.
    model = Transformer(_model(case), attention, device="meta" if splits else device, dtype=dtype)
    if splits:
        split_transformer(model, case.parallel.tp_mesh(), device)
    if case.checkpoint is not None:
        from models.checkpointing import checkpoint_blocks

        selective = case.checkpoint.scope == "selective"
        checkpoint_blocks(model, every=case.checkpoint.blocks, selective=selective)
    assert case.compile is not None, "train_step uses compile"
    mode = None if case.compile.mode == "default" else case.compile.mode
    if case.compile.scope == "model":
        model.compile(mode=mode, dynamic=False)
    elif case.compile.scope == "block":
        for block in model.blocks:
            block.compile(mode=mode, dynamic=False)
    return model
