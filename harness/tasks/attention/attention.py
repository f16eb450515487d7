"""``task=attention``: one attention call on q, k and v alone, forward and backward.

Used for the CS336 text's problems pytorch_attention and flash_benchmarking, its leaderboard, and
comparisons of kernels. Each pass runs forward, then backward; both are timed apart and together.
The batch is dense or packed (its sequences end to end), on one rank or split over several.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from harness.bench.bench import Bench
from harness.bench.phase_timer import PhaseTimer
from harness.bench.program import Program
from harness.cases import format as fmt
from harness.cases.case import Case
from harness.cases.column import CaseColumn, Point, note, option
from harness.cases.requirements import (
    require_at_least,
    require_choice,
    require_head_groups,
    require_several,
)
from harness.cases.task import WHOLE_PHASES, Task, Work, mask_options, task
from harness.measure import attention_calls, check, passes, profiling, split_call, timeline
from harness.tasks.lengths import ragged_lengths
from kernels import Attention, AttentionProblem, accounting
from kernels.registry import joined_later
from parallel.context.attention import SequenceParallelAttention

MODES = ("forward", "forward_backward")
PACKINGS = ("none", "equal", "ragged")


@task("attention")
@dataclass(kw_only=True, slots=True)
class AttentionTask(Task):
    """One attention call. Phases: forward, and with gradients backward and forward_backward."""

    mode: str = "forward_backward"
    """``forward`` without gradients, or ``forward_backward``."""
    num_heads: int = 16
    """Query heads; 1 removes the head dimension."""
    num_kv_heads: int | None = None
    """Key and value heads for grouped queries; None means one per query head."""
    head_dim: int = 64
    """Width of one head (d)."""
    value_dim: int | None = joined_later(None)
    """Columns of values and of the output where they are fewer than ``head_dim``, as in latent
    attention (128 beside keys of 192, DeepSeek-V2); None means as many."""
    causal: bool = True
    """Whether a query sees only the keys up to its own position."""
    kv_len: int | None = joined_later(None)
    """Keys of each sequence; None means seq_len. A causal mask is aligned to the bottom right."""
    packing: str = joined_later("none")
    """``none``: a dense batch. Packed end to end: ``equal`` lengths of seq_len, or ``ragged`` ones
    drawn from ``seed``, with as many attended pairs as the dense batch."""
    compile: bool = joined_later(False)
    """Call the attention through torch.compile, as the CS336 leaderboard does; a backend that
    goes through it anyway is called as it is."""
    cuda_graph: bool = joined_later(False)
    """Capture the forward and the backward pass once each and replay them, on all ranks, which
    leaves the time of kernels and transfers without that of their launches."""
    warmup_steps: int = 10
    """Untimed passes before measuring."""
    measure_steps: int = 100
    """Timed passes."""

    modes: ClassVar[tuple[str, ...]] = MODES
    uses: ClassVar[frozenset[str]] = frozenset({"profile"})
    profiled_phases: ClassVar[tuple[str, ...]] = ("forward", "backward", "forward_backward")
    gives_shape: ClassVar[bool] = True
    compared_phases: ClassVar[tuple[str, ...]] = WHOLE_PHASES
    columns: ClassVar[tuple[CaseColumn, ...]] = (
        CaseColumn(
            name="call_compiled",
            read=option("compile", otherwise=False),
            point=Point(
                header="torch.compile",
                describe=lambda value: "attention through torch.compile" if value else "",
                format=fmt.yes_no,
            ),
        ),
        CaseColumn(name="padding_tokens", read=note("padding_tokens", otherwise=0)),
    )

    def validate(self, case: Case) -> None:
        require_choice("task.mode", self.mode, MODES)
        require_choice("task.packing", self.packing, PACKINGS)
        sizes = ("num_heads", "num_kv_heads", "head_dim", "value_dim", "kv_len", "measure_steps")
        for key in sizes:
            value = getattr(self, key)
            if value is not None:
                require_at_least(f"task.{key}", value, 1)
        require_at_least("task.warmup_steps", self.warmup_steps, 0)
        require_head_groups(self.num_heads, self.num_kv_heads)
        if self.value_dim is not None and self.value_dim >= self.head_dim:
            raise ValueError(
                f"task.value_dim={self.value_dim}: must be less than task.head_dim="
                f"{self.head_dim}; leave it out for values as wide as keys"
            )
        if self.kv_len is not None and self.packing != "none":
            raise ValueError(
                f"task.kv_len={self.kv_len}: a packed sequence has as many keys as queries; "
                "leave it out, or use task.packing=none"
            )
        if self.kv_len is not None and self.causal and self.kv_len < case.seq_len:
            raise ValueError(
                f"task.kv_len={self.kv_len}: with task.causal=true, queries would see no key; "
                f"must be at least seq_len={case.seq_len}"
            )
        self._validate_mask(case)
        if self.packing == "ragged":
            require_several("task.packing=ragged", case.batch_size, "sequence")
        if case.parallel.dp > 1:
            raise ValueError(
                f"parallel.dp={case.parallel.dp}: task=attention has no gradients to reduce; "
                "split its sequences with parallel.cp=, or use task=train_step"
            )
        if case.parallel.tp > 1:
            raise ValueError(
                f"parallel.tp={case.parallel.tp}: task=attention has no weights to split; set "
                "task.num_heads= to those of one rank, or use task=train_step"
            )
        if case.parallel.cp > 1 and self.value_dim is not None:
            raise ValueError(
                f"task.value_dim={self.value_dim}: a sequence that is split over parallel.cp="
                f"{case.parallel.cp} ranks has values as wide as its keys; leave it out"
            )
        if case.parallel.cp > 1 and self.kv_len is not None:
            raise ValueError(
                f"task.kv_len={self.kv_len}: a sequence that is split over parallel.cp="
                f"{case.parallel.cp} ranks has as many keys as queries; leave it out"
            )

    def _validate_mask(self, case: Case) -> None:
        options = mask_options(case.attention)
        prefix_len, window = options.get("prefix_len"), options.get("window")
        if prefix_len and not self.causal:
            raise ValueError(
                f"attention.prefix_len={prefix_len}: with task.causal=false every query sees all "
                "keys; leave it out, or use task.causal=true"
            )
        if window is not None and not self.causal and self.kv_len is not None:
            # The first query stands kv_len - seq_len keys in, and sees those up to the window.
            least = case.seq_len - window + 1
            if self.kv_len < least:
                raise ValueError(
                    f"task.kv_len={self.kv_len}: with attention.window={window}, queries would see "
                    f"no key; must be at least {least}"
                )

    def compiles(self, case: Case) -> bool:
        return self.compile

    def words(self) -> list[str]:
        found = [self.packing] if self.packing != "none" else []
        found += [f"kv{self.kv_len}"] if self.kv_len is not None else []
        found += [f"values_{self.value_dim}"] if self.value_dim is not None else []
        found += ["torch_compile"] if self.compile else []
        return found + (["cuda_graph"] if self.cuda_graph else [])

    def num_passes(self) -> int:
        return self.warmup_steps + self.measure_steps

    def why_unsupported(self, case: Case) -> str | None:
        if self.cuda_graph and case.device != "cuda":
            return "CUDA graphs exist on CUDA devices only"
        return Task.why_unsupported(self, case)

    def attention_problem(self, case: Case) -> AttentionProblem:
        dense = AttentionProblem(
            batch_size=case.batch_size,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads or self.num_heads,
            q_len=case.seq_len,
            kv_len=self.kv_len or case.seq_len,
            head_dim=self.head_dim,
            dtype=case.precision.compute,
            device=case.device,
            causal=self.causal,
            needs_grad=self.mode != "forward",
            cp=case.parallel.cp,
            autocast=case.precision.autocast is not None,
            value_dim=self.value_dim,
            **mask_options(case.attention),
        )
        if self.packing == "none":
            return dense
        longest = max(self.lengths(case))
        return replace(dense, q_len=longest, kv_len=longest, packed=True)

    def lengths(self, case: Case) -> list[int]:
        """Queries of each sequence of the batch."""
        if self.packing == "ragged":
            return ragged_lengths(case.batch_size, case.seq_len, case.seed)
        return [case.seq_len] * case.batch_size

    def _parts(self, case: Case) -> list[AttentionProblem]:
        """Problems whose FLOPs and bytes add up to those of the batch without padding."""
        problem = self.attention_problem(case)
        if self.packing != "ragged":
            return [problem]
        return [
            replace(problem, batch_size=1, q_len=length, kv_len=length)
            for length in self.lengths(case)
        ]

    def work(self, case: Case) -> dict[str, Work]:
        parts, cp = self._parts(case), case.parallel.cp
        # Per rank; of a split sequence the mean over ranks.
        tokens = sum(self.lengths(case)) // cp
        flops = sum(map(accounting.forward_flops, parts)) / cp
        moved = sum(map(accounting.forward_bytes, parts)) / cp
        work = {"forward": Work(flops=flops, bytes=moved, tokens=tokens)}
        if self.mode == "forward":
            return work
        backward_flops = sum(map(accounting.backward_flops, parts)) / cp
        backward_bytes = sum(map(accounting.backward_bytes, parts)) / cp
        work["backward"] = Work(flops=backward_flops, bytes=backward_bytes, tokens=tokens)
        work["forward_backward"] = Work(
            flops=flops + backward_flops, bytes=moved + backward_bytes, tokens=tokens
        )
        return work

    def predicted_memory(self, case: Case) -> dict[str, float] | None:
        """Bytes at the peak of a pass; not of what torch.compile or a CUDA graph makes of one.

        Nor of split sequences with sinks, which are added after blocks are merged.
        """
        problem = self.attention_problem(case)
        if not isinstance(case.attention, Attention):
            return None
        if self.cuda_graph or (self.compile and not case.attention.compiles):
            return None
        if problem.sinks and case.parallel.cp > 1:
            return None
        if problem.packed:
            # Whatever a packed call holds it holds for each token.
            tokens = sum(self.lengths(case))
            problem = replace(problem, batch_size=1, q_len=tokens, kv_len=tokens)
        return case.attention.role(Attention).peak_memory(problem)

    def predicted_before_backward(self, case: Case) -> dict[str, float] | None:
        problem = self.attention_problem(case)
        if not problem.needs_grad or case.parallel.cp > 1:
            return None
        # Packed calls of every backend recompute the scores instead of keeping them.
        keeps_scores = not problem.packed and case.attention.keeps_scores(problem)
        total: dict[str, float] = {}
        for part in self._parts(case):
            for name, value in accounting.memory(part, keeps_scores=keeps_scores).items():
                total[name] = total.get(name, 0.0) + value
        return total

    def _call(self, case: Case, device: torch.device) -> attention_calls.AttentionCall:
        if self.packing == "none":
            return attention_calls.DenseCall(case, device, sequence_major=False)
        return attention_calls.PackedCall(case, device, self.lengths(case))

    def run(self, case: Case, bench: Bench) -> None:
        if case.parallel.cp == 1:
            self._check_and_measure(case, bench, self._call(case, bench.device))
            return
        lengths = None if self.packing == "none" else self.lengths(case)
        scheme = case.attention.role(SequenceParallelAttention)
        with scheme.bind(case.parallel.cp_group(), bench.device) as attention:
            call = split_call.SplitCall(case, bench.device, attention, lengths)
            problem = self.attention_problem(case)
            bench.outcome.notes["kernel"] = scheme.kernel_of(problem)
            bench.outcome.notes["transport"] = scheme.transport_of(problem)
            if call.padding:
                bench.outcome.notes["padding_tokens"] = call.padding
            self._check_and_measure(case, bench, call)
            bench.add_to_peaks(attention.outside_bytes)
            if not self.cuda_graph:
                # Passes are traced by events between launches, which a replay does not have.
                timeline.note_timeline(case, bench, call, attention)

    def _check_and_measure(
        self, case: Case, bench: Bench, call: attention_calls.AttentionCall
    ) -> None:
        if self.compile and not case.attention.compiles:
            # Compiled once, for the check and the measurement.
            call.attend = torch.compile(call.attend, dynamic=False)  # type: ignore[method-assign]
        kind = passes.GraphedPasses if self.cuda_graph else passes.Passes
        check.check_call(case, bench, call, kind)
        bench.vote()

        bench.stage("set-up")
        bench.release_memory()
        baseline = bench.allocated_bytes()
        inputs = call.inputs()
        both = kind(case, call, inputs)
        results = check.TimedResults(case, bench, call, inputs)
        if self.mode == "forward":

            def step(timer: PhaseTimer) -> None:
                results.forget()
                with timer.phase("forward"):
                    o = both.forward()
                results.keep(o)

        else:
            bench.note_before_backward(both.forward, inputs=inputs, baseline=baseline)
            do = results.do = call.output_gradient(inputs[0])

            def step(timer: PhaseTimer) -> None:
                results.forget()
                with timer.phases("forward_backward") as begins:
                    begins("forward")
                    o = both.forward()
                    begins("backward")
                    gradients = both.backward(o, do)
                results.keep(o, *gradients)

        bench.measure(
            step,
            warmup=self.warmup_steps,
            passes=self.measure_steps,
            flush_cache=True,
            check=results.check,
        )
        results.forget()
        profiling.profile_if_asked(case, bench, Program(step=step))
