"""One training step of the transformer: forward, backward, optimizer, timed apart.

The CS336 text's benchmarking_script problem. The forward phase includes the loss; the whole
step is timed by the host clock, synchronised at its end, and so includes launch overhead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar, cast

from harness.case import Case, require_at_least, require_choice
from harness.task import Task, Work, task
from kernels import AttentionProblem
from kernels.ranges import named_range
from models import accounting
from models.config import ModelConfig

if TYPE_CHECKING:
    import torch
    from torch import nn

    from harness.bench import Bench, PhaseTimer
    from harness.check import Call
    from harness.tasks._batch import Batch
    from models.transformer import Attention

MODES = ("forward", "forward_backward", "train_step")

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


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

    def validate(self, case: Case) -> None:
        require_choice("task.mode", self.mode, MODES)
        require_at_least("task.warmup_steps", self.warmup_steps, 0)
        require_at_least("task.measure_steps", self.measure_steps, 1)
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
            num_heads=model.num_heads,
            num_kv_heads=model.kv_heads,
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
        cp = case.parallel.cp
        forward = accounting.forward_flops(_model(case), case.batch_size, case.seq_len) / cp
        backward = accounting.backward_flops(_model(case), case.batch_size, case.seq_len) / cp
        tokens = case.batch_size * case.seq_len // cp
        phases = {"forward": Work(flops=forward, tokens=tokens)}
        total = forward
        if self.mode != "forward":
            phases["backward"] = Work(flops=backward)
            total += backward
        if self.mode == "train_step":
            phases["optimizer"] = Work(flops=0.0)
        phases["step"] = Work(flops=total, tokens=tokens)
        return phases

    def predicted_memory(self, case: Case) -> dict[str, float]:
        prediction = self.predict(case)
        # Backward frees activations while it fills gradients: the larger of the two counts.
        return {
            "parameters": prediction.parameters,
            "optimizer_state": prediction.optimizer_state * case.parallel.optimizer_state_share,
            "gradients_or_activations": prediction.gradients_or_activations,
        }

    def predict(self, case: Case) -> accounting.MemoryPrediction:
        """Memory of one rank by formula, part by part."""
        precision, checkpoint = case.precision, case.checkpoint
        # Scores that are not kept for a backward pass are there for a moment all the same.
        problem = replace(self.attention_problem(case), needs_grad=True)
        return accounting.predict_memory(
            _model(case),
            batch_size=case.batch_size,
            # Each rank holds an equal part; what visits it in attention is small beside that.
            seq_len=-(-case.seq_len // case.parallel.cp),
            mode=cast(accounting.Mode, self.mode),
            attention_saves_scores=case.attention.keeps_scores(problem),
            param_bytes=_DTYPE_BYTES[precision.parameters],
            activation_bytes=_DTYPE_BYTES[precision.compute],
            autocast=precision.autocast is not None,
            checkpoint_every=checkpoint.blocks if checkpoint is not None else None,
            checkpoint_selective=checkpoint is not None and checkpoint.scope == "selective",
            on_cpu=case.device == "cpu",
        )

    def run(self, case: Case, bench: Bench) -> None:
        from harness.check import DenseCall
        from harness.split_call import SplitCall
        from harness.tasks._batch import split_batch, whole_batch

        if case.parallel.cp == 1:
            call = DenseCall(case, bench.device, sequence_major=True)
            make_batch = partial(whole_batch, case, bench.device, bench.rank)
            self._run(case, bench, call, case.attention, make_batch)
            return
        with case.attention.bind(case.parallel.cp_group(), bench.device) as attention:
            split = SplitCall(case, bench.device, attention)
            if split.padding:
                bench.outcome.notes["padding_tokens"] = split.padding
            make_batch = partial(split_batch, case, bench.device, bench.rank, attention.layout)
            self._run(case, bench, split, attention, make_batch)

    def _run(
        self,
        case: Case,
        bench: Bench,
        call: Call,
        attention: Attention,
        make_batch: Callable[[], Batch],
    ) -> None:
        """Check the attention call, then measure steps of a model that attends by it."""
        import torch

        from harness.bench import WrongResult
        from harness.check import autocast, check_call
        from harness.program import Program
        from models.transformer import cross_entropy

        check_call(case, bench, call)
        bench.vote()

        bench.stage("set-up")
        trains = self.mode != "forward"
        bench.release_memory()
        torch.manual_seed(case.seed)
        module = _build_model(case, attention, bench.device)
        bench.vote()
        model = case.parallel.wrap(module)
        optimizer = None
        if self.mode == "train_step":
            optimizer = case.parallel.optimizer(
                model.parameters(), torch.optim.AdamW, lr=1e-4, fused=True
            )
        scaler = torch.amp.GradScaler(case.device, enabled=case.precision.grad_scaler)
        batch = make_batch()
        uses_cuda_graphs = case.compile is not None and case.compile.mode in (
            "reduce-overhead",
            "max-autotune",
        )
        last_loss: torch.Tensor | None = None

        def step(timer: PhaseTimer) -> None:
            nonlocal last_loss
            if uses_cuda_graphs:
                torch.compiler.cudagraph_mark_step_begin()
            with timer.phase("forward"), torch.set_grad_enabled(trains), autocast(case):
                logits = model(batch.tokens, batch.positions)
                with named_range("loss"):
                    loss = cross_entropy(logits, batch.targets, batch.num_targets)
                # Else they would stay for the backward pass, which needs them no more.
                del logits
            last_loss = loss.detach()
            if trains:
                with timer.phase("backward"):
                    scaler.scale(loss).backward()
                    case.parallel.after_backward(model)
            if optimizer is not None:
                with timer.phase("optimizer"):
                    scaler.step(optimizer)
                    scaler.update()
            model.zero_grad(set_to_none=True)

        bench.measure(step, warmup=self.warmup_steps, passes=self.measure_steps, whole_step="step")
        if case.profile is not None and bench.is_last_round:
            program = Program(step=step, model=module, optimizer=optimizer)
            case.profile.run(case, bench, program)
        assert last_loss is not None
        losses = bench.gather(float(last_loss))
        # Ranks that share sequences have parts of one loss, and others have losses of their own.
        loss = sum(losses) / len(losses)
        bench.outcome.notes["loss"] = loss
        if not abs(loss) < float("inf"):
            raise WrongResult(f"the loss of the last step is {loss}")


def _model(case: Case) -> ModelConfig:
    assert case.model is not None, "train_step uses a model"
    return case.model


def _build_model(case: Case, attention: Attention, device: torch.device) -> nn.Module:
    """The transformer on its device, compiled as the case asks."""
    import torch

    from models.transformer import Transformer

    dtype = getattr(torch, case.precision.parameters)
    model = Transformer(_model(case), attention, device=device, dtype=dtype)
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
