"""Memory and communication of a training step on one rank, by formula for any strategy.

The transformer's own terms are those of :mod:`models.accounting` and :mod:`models.memory`; the
case's strategy declares how ranks divide them (:class:`parallel.Strategy`). Plans and tables show
these predictions beside the measurements. Arithmetic alone, without torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import cast

from harness.cases.case import Case
from harness.cases.precision import DTYPE_BYTES
from harness.predictions import fully_sharded
from harness.predictions.allocator import rounding_bytes
from models import accounting
from models.memory import MemoryPrediction, Mode, TrainingStep
from parallel.collectives import bus_factor
from parallel.data.buckets import fill_buckets

MIB = 2**20


@dataclass(kw_only=True, slots=True, frozen=True)
class Footprint:
    """Peak bytes of each category on one rank; not all peak at once.

    Gradients lie in buffers, which exist from the start, or are allocated by the backward pass.
    That frees activations meanwhile, so that only the larger of the two counts.
    """

    parameters: float
    gathered_parameters: float
    """Sharded parameters that are gathered while they are in use."""
    gradient_buffers: float
    gradients: float
    """Gradients that a rank keeps for the optimizer, in buffers or not."""
    loose_gradients: float
    """Gradients outside buffers at the end of the backward pass."""
    optimizer_state: float
    activations: float
    saved_activations: float
    """Those of them that are held when the forward pass ends."""
    recomputed: float = 0.0
    """Activations that a checkpointed block computes again while all gradients fill up."""
    rounding: float = 0.0
    """Bytes that the allocator counts beyond a tensor's own, for each byte of parameters."""

    @property
    def after_initialisation(self) -> float:
        return self.parameters + self.gradient_buffers

    @property
    def before_first_optimizer_step(self) -> float:
        return self.parameters + max(self.gradients, self.gradient_buffers)

    @property
    def after_first_optimizer_step(self) -> float:
        return self.before_first_optimizer_step + self.optimizer_state

    def peak_parts(self) -> dict[str, float]:
        """Bytes held at the peak by name, which sum to the peak."""
        filled = self.loose_gradients + self.recomputed
        parts = {
            "parameters": self.parameters,
            "gathered_parameters": self.gathered_parameters,
            "gradient_buffers": self.gradient_buffers,
            "optimizer_state": self.optimizer_state,
            "gradients_or_activations": max(filled, self.activations),
            "rounding": self._rounding(with_gradients=filled > self.activations),
        }
        always = ("parameters", "optimizer_state", "gradients_or_activations")
        return {name: size for name, size in parts.items() if size or name in always}

    def _rounding(self, *, with_gradients: bool) -> float:
        """Of parameters and AdamW's state, and of gradients if they are there at the peak."""
        tensors = self.optimizer_state
        if not self.gathered_parameters:
            # Shards of parameters lie in a few large buffers.
            tensors += self.parameters
        if with_gradients:
            tensors += self.loose_gradients
        return self.rounding * tensors

    @property
    def peak(self) -> float:
        return sum(self.peak_parts().values())


def footprint(case: Case) -> Footprint:
    """Bytes on one rank in a case of task=train_step, as if the model were not compiled."""
    assert case.model is not None, "training steps have a model"
    strategy = case.parallel
    whole = _of_one_data_rank(case)
    trains = whole.gradients > 0
    sizes = gradient_sizes(case)
    gathered, activations = 0.0, whole.activations
    if strategy.parameter_share < 1:
        moment = _fully_sharded_peak(case, whole)
        gathered, activations = moment.gathered, moment.gradients_or_activations
    return Footprint(
        parameters=whole.parameters * strategy.parameter_share,
        gathered_parameters=gathered,
        # Containers make their buffers whether or not a backward pass follows.
        gradient_buffers=gradient_bytes(case) * strategy.gradient_buffers(sizes),
        gradients=whole.gradients * strategy.gradient_share,
        loose_gradients=whole.gradients * strategy.loose_gradients(sizes) if trains else 0.0,
        optimizer_state=whole.optimizer_state * strategy.optimizer_state_share,
        activations=activations,
        saved_activations=whole.saved,
        recomputed=whole.recomputed,
        rounding=_rounding(tuple(sizes)) if case.device == "cuda" else 0.0,
    )


@cache
def _rounding(sizes: tuple[int, ...]) -> float:
    return rounding_bytes(sizes) / sum(sizes)


def _fully_sharded_peak(case: Case, whole: MemoryPrediction) -> fully_sharded.Moment:
    assert case.model is not None, "training steps have a model"
    count = accounting.count_parameters(case.model, case.attention_variant)
    element = DTYPE_BYTES[_gathered_dtype(case)]
    scale = element / case.parallel.tp
    return fully_sharded.peak_moment(
        whole,
        num_blocks=case.model.num_layers,
        block=(count.attention + count.feed_forward) / case.model.num_layers * scale,
        outside=(count.embedding + count.head) * scale,
        gradient_share=case.parallel.gradient_share,
    )


def step_memory(case: Case) -> MemoryPrediction:
    """Memory of a training step on one rank, by category, as the strategy divides it."""
    whole, strategy = _of_one_data_rank(case), case.parallel
    return replace(
        whole,
        parameters=whole.parameters * strategy.parameter_share,
        gradients=whole.gradients * strategy.gradient_share,
        optimizer_state=whole.optimizer_state * strategy.optimizer_state_share,
    )


def _of_one_data_rank(case: Case) -> MemoryPrediction:
    """Memory of a step without data parallelism, on one of the tensor-parallel ranks."""
    assert case.model is not None, "training steps have a model"
    precision, checkpoint = case.precision, case.checkpoint
    # Weights that modules see in a low precision already are not cast by autocast.
    casts = precision.autocast is not None and _gathered_dtype(case) == precision.parameters
    computes = precision.compute if casts else _gathered_dtype(case)
    # Scores exist for a moment even where no backward pass keeps them.
    problem = replace(case.attention_problem, needs_grad=True)
    return TrainingStep(
        config=case.model,
        batch_size=case.batch_size,
        # Each rank holds an equal part; visiting keys in attention are small beside that.
        seq_len=-(-case.seq_len // case.parallel.cp),
        mode=cast(Mode, getattr(case.task, "mode", "train_step")),
        attention_saves_scores=case.attention.keeps_scores(problem),
        param_bytes=DTYPE_BYTES[precision.parameters],
        activation_bytes=DTYPE_BYTES[computes],
        stream_bytes=DTYPE_BYTES[_gathered_dtype(case)],
        # Explicit softmax caps scores of float16 in float32.
        capped_bytes=4 if computes == "float16" else None,
        autocast=casts,
        tp=case.parallel.tp,
        checkpoint_every=checkpoint.blocks if checkpoint is not None else None,
        checkpoint_selective=checkpoint is not None and checkpoint.scope == "selective",
        on_cpu=case.device == "cpu",
        variant=case.attention_variant,
    ).predict_memory()


def _gathered_dtype(case: Case) -> str:
    """The dtype that weights are gathered and used in."""
    own: str | None = getattr(case.parallel, "compute_dtype", None)
    return own or case.precision.parameters


def gradient_bytes(case: Case) -> int:
    """Bytes of the gradients that data ranks average, equal to those of the parameters.

    With tensor parallelism, those of one rank's shards.
    """
    return DTYPE_BYTES[case.precision.parameters] * sum(_parameter_sizes(case))


def gradient_sizes(case: Case) -> list[int]:
    """Bytes of each gradient, in the order of the model's parameters."""
    element = DTYPE_BYTES[case.precision.parameters]
    return [size * element for size in _parameter_sizes(case)]


def num_gradients(case: Case) -> int:
    """Parameters of the model that are tensors of their own."""
    return len(_parameter_sizes(case))


def _parameter_sizes(case: Case) -> list[int]:
    assert case.model is not None, "training steps have a model"
    return accounting.parameter_sizes(case.model, case.parallel.tp, case.attention_variant)


def traffic_bytes(case: Case) -> dict[str, float]:
    """Size S, as nccl-tests define it, that a step puts through each collective operation.

    Parameters and gradients, among the data ranks. Attention over several ranks sends keys and
    values besides, and tensor parallelism activations; a forward pass alone sends neither
    parameters nor gradients.
    """
    if getattr(case.task, "mode", "train_step") == "forward":
        return {}
    size = gradient_bytes(case) * DTYPE_BYTES[_gathered_dtype(case)]
    size //= DTYPE_BYTES[case.precision.parameters]
    return {name: times * size for name, times in case.parallel.traffic.items()}


def step_sent_bytes(case: Case) -> float:
    """Bytes of a step's gradients and parameters on each rank's link."""
    return sum(
        size * bus_factor(name, case.parallel.predicted_ranks(name)[0])
        for name, size in traffic_bytes(case).items()
    )


def sent_bytes(traffic: dict[str, float], num_ranks: int) -> float:
    """Bytes on each rank's link: sizes times the factors of the bus bandwidth."""
    return sum(size * bus_factor(name, num_ranks) for name, size in traffic.items())


def buckets_of_case(case: Case, bucket_size_mib: float) -> int:
    """Buckets of the model's gradients, the last parameter's first."""
    return len(fill_buckets(gradient_sizes(case)[::-1], bucket_size_mib * MIB))
