"""``task=train_step``: a training step of the transformer, with its phases timed apart.

The CS336 text's benchmarking_script problem. The forward phase includes the loss; the whole
step is timed by the host clock, synchronised at its end, and so includes launch overhead.

On several ranks steps follow each other without a pause, and each is timed from its start to the
start of the next, since a strategy may overlap communication with the next step. Strategies that
synchronise gradients after the backward pass have a further phase, communication: from the
rank's own gradients to their averages. Memory is noted in a first step, and traffic and its
timeline in steps after the measured ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

from harness.bench import step_memory, step_trace, step_traffic
from harness.bench.bench import Bench
from harness.bench.outcome import WrongResult
from harness.bench.phase_timer import PhaseTimer
from harness.bench.program import Program
from harness.cases import format as fmt
from harness.cases.case import Case
from harness.cases.column import CaseColumn, Point, in_order, note
from harness.cases.requirements import require_at_least, require_choice
from harness.cases.task import Task, Work, task
from harness.measure import attention_calls, check, profiling, split_call
from harness.predictions import training
from harness.tasks import batch
from harness.tasks.training import captured_step, strategy_check
from harness.tasks.training import step as training_step
from kernels import Attention, AttentionProblem
from kernels.problem import MASKS
from kernels.registry import joined_later
from models import accounting, layers
from models.config import ModelConfig
from models.memory import MemoryPrediction
from parallel.context.attention import SequenceParallelAttention
from parallel.context.blocks.layouts import Layout

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
    clip_grad_norm: float | None = joined_later(None)
    """The largest norm of all gradients together, to which each step clips them before the
    optimizer runs, in its phase; null leaves them as they are."""
    cuda_graph: bool = joined_later(False)
    """Capture the forward pass, the backward pass with what ranks exchange in it, and the optimizer
    once each and replay them, on all ranks: the step without the time of its launches."""

    modes: ClassVar[tuple[str, ...]] = MODES
    uses: ClassVar[frozenset[str]] = frozenset({"model", "compile", "checkpoint", "profile"})
    profiled_phases: ClassVar[tuple[str, ...]] = ("forward", "backward", "optimizer")
    expected_phase: ClassVar[str] = "step"
    columns: ClassVar[tuple[CaseColumn, ...]] = (
        CaseColumn(name="traffic", read=note("traffic")),
        CaseColumn(name="gradient_norm", read=note("gradient_norm")),
        CaseColumn(
            name="clipping",
            read=lambda record: clipping_of(record.case["task"].get("clip_grad_norm")),
            point=Point(
                header="clipping",
                describe=fmt.unless("none", "gradients clipped to {}"),
                looks=in_order("none"),
                after="checkpoint",
            ),
        ),
    )

    def validate(self, case: Case) -> None:
        require_choice("task.mode", self.mode, MODES)
        require_at_least("task.warmup_steps", self.warmup_steps, 0)
        require_at_least("task.measure_steps", self.measure_steps, 1)
        if self.clip_grad_norm is not None:
            _require_clipping(self.clip_grad_norm, self.mode)
        _require_divisible(case)
        if (
            self.cuda_graph
            and case.compile is not None
            and case.compile.mode in training_step.CUDA_GRAPH_MODES
        ):
            raise ValueError(
                f"task.cuda_graph=true: compile.mode={case.compile.mode} captures CUDA graphs "
                "itself; use compile.mode=default, or task.cuda_graph=false"
            )
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

    def words(self) -> list[str]:
        found = [] if self.clip_grad_norm is None else [f"clip{self.clip_grad_norm:g}"]
        return found + (["cuda_graph"] if self.cuda_graph else [])

    def num_passes(self) -> int:
        return self.warmup_steps + self.measure_steps

    def attention_problem(self, case: Case) -> AttentionProblem:
        model = _model(case)
        variant = case.attention_variant
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
            **{name: getattr(variant, name) for name in MASKS},
        )

    def why_unsupported(self, case: Case) -> str | None:
        if self.cuda_graph and case.device != "cuda":
            return "CUDA graphs exist on CUDA devices only"
        if self.cuda_graph and case.world_size > 1 and not case.parallel.captures:
            return (
                f"parallel={case.parallel.name} is not captured in a CUDA graph: its host decides "
                "during a step, or leaves work to the next one"
            )
        # Layers with full attention ask for less, which a backend may still not take.
        reasons = (case.attention.why_unsupported(part.attention_problem) for part in _kinds(case))
        return next((reason for reason in reasons if reason is not None), None)

    def work(self, case: Case) -> dict[str, Work]:
        # Ranks share a sequence's tokens (cp), and every matmul and head (tp), in equal parts.
        ranks = case.parallel.cp * case.parallel.tp
        sizes, variant = (_model(case), case.batch_size, case.seq_len), case.attention_variant
        forward = accounting.forward_flops(*sizes, variant=variant) / ranks
        backward = accounting.backward_flops(*sizes, variant=variant) / ranks
        tokens = case.batch_size * case.seq_len // ranks
        phases = {"forward": Work(flops=forward, tokens=tokens)}
        total = forward
        sent = training.step_sent_bytes(case)
        if self.mode != "forward":
            phases["backward"] = Work(flops=backward)
            total += backward
            if case.parallel.synchronizes_after_backward and not self.cuda_graph:
                phases["communication"] = Work(flops=0.0)
        if self.mode == "train_step":
            phases["optimizer"] = Work(flops=0.0)
        phases["step"] = Work(flops=total, tokens=tokens, sent_bytes=sent or None)
        return phases

    def predicted_memory(self, case: Case) -> dict[str, float] | None:
        """Bytes at the peak of a step.

        Not where torch.compile decides on what is materialised, nor of CUDA graphs, whose memory is
        theirs between steps too.
        """
        problem = replace(self.attention_problem(case), needs_grad=True)
        if (
            self.cuda_graph
            or self.compiles(case)
            or (case.attention.compiles and case.attention.keeps_scores(problem))
        ):
            return None
        return training.footprint(case).peak_parts()

    def predicted_step_memory(self, case: Case) -> MemoryPrediction:
        return training.step_memory(case)

    def run(self, case: Case, bench: Bench) -> None:
        # Ranks that share weights train on the same tokens.
        rank = case.parallel.data_rank(bench.rank)
        if case.parallel.cp == 1:
            dense = [
                attention_calls.DenseCall(kind, bench.device, sequence_major=True)
                for kind in _kinds(case)
            ]
            make_batch = partial(batch.whole_batch, case, bench.device, rank)
            own = case.attention.role(Attention)
            self._check_and_measure(case, bench, dense, own, make_batch, layout=None)
            return
        scheme = case.attention.role(SequenceParallelAttention)
        with scheme.bind(case.parallel.cp_group(), bench.device) as attention:
            split = [
                split_call.SplitCall(kind, bench.device, attention, sequence_major=True)
                for kind in _kinds(case)
            ]
            if split[0].padding:
                bench.outcome.notes["padding_tokens"] = split[0].padding
            make_batch = partial(batch.split_batch, case, bench.device, rank, attention.layout)
            self._check_and_measure(
                case, bench, split, attention, make_batch, layout=attention.layout
            )

    def _check_and_measure(
        self,
        case: Case,
        bench: Bench,
        calls: Sequence[attention_calls.AttentionCall],
        attention: layers.CoreAttention,
        make_batch: Callable[[], batch.Batch],
        *,
        layout: Layout | None,
    ) -> None:
        """Check the attention calls, then measure steps of a model that makes them.

        Over several ranks the strategy is held to one process, before the first round of measured
        steps and after the last.
        """
        for call in calls:
            check.check_call(case, bench, call)
            bench.vote()
        several = case.world_size > 1
        trains_together = several and self.mode != "forward"
        if trains_together and bench.in_first_round:
            strategy_check.check_strategy(case, bench, attention, layout, draw=0)

        bench.stage("set-up")
        bench.release_memory()
        baseline = bench.allocated_bytes()
        kind = captured_step.CapturedStep if self.cuda_graph else training_step.MeasuredStep
        step = kind(
            case, bench, attention, make_batch, mode=self.mode, max_norm=self.clip_grad_norm
        )
        # Without warm-up, nothing may run before the measured steps.
        warmup = self.warmup_steps
        if trains_together and warmup:
            notes = step_memory.MemoryNotes(bench, step.model, step.optimizer, baseline)
            step_memory.note_first_step(bench, step.launch, notes)
            warmup -= 1
        bench.measure(
            step, warmup=warmup, passes=self.measure_steps, whole_step="step", in_a_row=several
        )
        _note_loss(bench, step.loss())
        norm = step.gradient_norm()
        if norm is not None and math.isfinite(norm):
            bench.outcome.notes["gradient_norm"] = norm

        # From here on, the step runs beside the measured ones.
        bench.measure_device(step, whole_step="step")

        def finished_step(timer: PhaseTimer) -> None:
            # A profiler that stops while gloo still works would end the process.
            step(timer)
            step.finish()

        program = Program(
            step=finished_step, model=step.module, wrapped=step.model, optimizer=step.optimizer
        )
        profiling.profile_if_asked(case, bench, program)
        if trains_together and bench.in_last_round:
            step_traffic.note_traffic(bench, step.launch)
            if not self.cuda_graph:
                step_trace.note_timeline(bench, step, step.finish)
        step.finish()
        if trains_together:
            strategy_check.check_replicas(case, bench, step.model, step.module)
        if trains_together and bench.in_last_round:
            strategy_check.check_strategy(case, bench, attention, layout, draw=1)


def clipping_of(max_norm: float | None) -> str:
    """``task.clip_grad_norm`` as tables name it."""
    return "none" if max_norm is None else f"norm {max_norm:g}"


def _require_clipping(max_norm: float, mode: str) -> None:
    """Raise ValueError, naming the key, unless gradients can be clipped to this norm."""
    if max_norm <= 0:
        raise ValueError(
            f"task.clip_grad_norm={max_norm:g}: must be positive, or null to leave gradients as "
            "they are"
        )
    if mode != "train_step":
        raise ValueError(
            f"task.clip_grad_norm={max_norm:g}: task.mode={mode} has no optimizer's step before "
            "which gradients are clipped; leave it out"
        )


def _note_loss(bench: Bench, own: float) -> None:
    """Note the mean loss over ranks; WrongResult if it is not finite."""
    losses = bench.gather(own)
    # Ranks that share sequences have parts of one loss, and others have losses of their own.
    loss = sum(losses) / len(losses)
    bench.outcome.notes["loss"] = loss
    if not abs(loss) < float("inf"):
        raise WrongResult(f"the loss of the last step is {loss}")


def _model(case: Case) -> ModelConfig:
    assert case.model is not None, "train_step uses a model"
    return case.model


def _kinds(case: Case) -> list[Case]:
    """The case as each kind of its layers attends: with its window and, of some, without."""
    if _model(case).full_attention_every is None:
        return [case]
    own = case.attention.role(Attention)
    full = replace(
        case,
        attention=replace(own, window=None),
        model=replace(_model(case), full_attention_every=None),
    )
    return [case, full]


def _require_divisible(case: Case) -> None:
    """Raise ValueError, naming the key, unless parallel.tp divides all that its ranks split."""
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
