"""Parameters, FLOPs and memory of one training step of the transformer, by formula.

What the measurements are divided by (MFU) and compared with (peak memory), and what
``plan=true`` prints before anything runs; hence arithmetic alone, without torch.

One matmul of M x K by K x N is 2MKN FLOPs. Model FLOPs never count recomputation, so the
backward pass, two matmuls for each one of the forward pass, is twice the forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, assert_never

from kernels.accounting import attended_pairs
from models.config import ModelConfig

BACKWARD_OVER_FORWARD = 2

Mode = Literal["forward", "forward_backward", "train_step"]

_FLOAT32_BYTES = 4
_INT64_BYTES = 8


@dataclass(kw_only=True, slots=True, frozen=True)
class ParameterCount:
    """Parameters of the whole model by what they do."""

    embedding: int
    attention: int
    feed_forward: int
    norms: int
    head: int

    @property
    def total(self) -> int:
        return self.embedding + self.linear + self.norms

    @property
    def linear(self) -> int:
        """Weights that multiply every token: all but the embedding and the norms."""
        return self.attention + self.feed_forward + self.head


def count_parameters(config: ModelConfig) -> ParameterCount:
    """The parameters of :class:`models.transformer.Transformer`, by part."""
    d_kv = config.kv_heads * config.head_dim
    attention, rank = config.d_model * (2 * config.d_model + 2 * d_kv), config.kv_lora_rank
    if rank is not None:
        # Down to the latent and its rotary part, and up to heads' keys and values.
        up = config.num_heads * (2 * config.head_dim - config.rope_dim)
        attention = config.d_model * (2 * config.d_model + rank + config.rope_dim) + rank * up
    return ParameterCount(
        embedding=config.vocab_size * config.d_model,
        attention=config.num_layers * attention,
        feed_forward=config.num_layers * 3 * config.d_model * config.d_ff,
        norms=(2 * config.num_layers + 1) * config.d_model + config.num_layers * (rank or 0),
        head=config.vocab_size * config.d_model,
    )


def parameter_sizes(config: ModelConfig, tp: int = 1) -> list[int]:
    """Elements of each parameter of :class:`models.transformer.Transformer`, in its order.

    On one of ``tp`` tensor-parallel ranks, which hold an equal part of all but the norms.
    """
    width, d_ff = config.d_model, config.d_ff // tp
    d_kv = config.kv_heads * config.head_dim
    q, k, v, o = (size // tp for size in (width**2, width * d_kv, width * d_kv, width**2))
    block = [width, q, k, v, o, width, *[width * d_ff] * 3]
    vocabulary = config.vocab_size * width // tp
    return [vocabulary, *block * config.num_layers, width, vocabulary]


def num_parameters(config: ModelConfig) -> int:
    """All parameters; the output head is not tied to the embedding."""
    return count_parameters(config).total


def residual_stream_bytes(
    config: ModelConfig, *, batch_size: int, seq_len: int, element_bytes: int
) -> int:
    """Of one tensor of the residual stream, B S E elements (problem memory_profiling d)."""
    return batch_size * seq_len * config.d_model * element_bytes


def matmul_flops_per_token(config: ModelConfig) -> float:
    """Forward FLOPs of the linear layers, head included: 2 a weight; the embedding is a lookup."""
    return 2 * count_parameters(config).linear


def forward_flops(
    config: ModelConfig, batch_size: int, seq_len: int, *, causal: bool = True
) -> float:
    """Linear layers and attention, 4 B H S^2 D a block, halved when causal."""
    pairs = attended_pairs(seq_len, seq_len, causal)
    attention = 4 * batch_size * config.num_heads * pairs * config.head_dim
    return batch_size * seq_len * matmul_flops_per_token(config) + config.num_layers * attention


def backward_flops(
    config: ModelConfig, batch_size: int, seq_len: int, *, causal: bool = True
) -> float:
    """Twice the forward pass."""
    return BACKWARD_OVER_FORWARD * forward_flops(config, batch_size, seq_len, causal=causal)


def train_step_flops(
    config: ModelConfig, batch_size: int, seq_len: int, *, causal: bool = True
) -> float:
    """Forward and backward; the optimizer's are a few per parameter and not counted."""
    return (1 + BACKWARD_OVER_FORWARD) * forward_flops(config, batch_size, seq_len, causal=causal)


@dataclass(kw_only=True, slots=True, frozen=True)
class MemoryPrediction:
    """Bytes on one device, by what they hold, each at its own largest."""

    parameters: float
    gradients: float
    optimizer_state: float
    activations: float
    """What autograd saved, with the loss's gradients; without a backward pass, the working set."""
    saved: float = 0.0
    """Of the activations, those that are there when the forward pass ends."""
    recomputed: float = 0.0
    """What a checkpointed block saves when it is computed again, as all gradients fill up."""

    @property
    def gradients_or_activations(self) -> float:
        """The larger of the two: the backward pass frees activations while it fills gradients.

        Last block first. This holds where each step starts without gradients, as after
        ``zero_grad(set_to_none=True)``.
        """
        return max(self.gradients + self.recomputed, self.activations)

    @property
    def total(self) -> float:
        """Bytes at the peak, which is less than the sum of the parts."""
        return self.parameters + self.optimizer_state + self.gradients_or_activations


def predict_memory(
    config: ModelConfig,
    *,
    batch_size: int,
    seq_len: int,
    mode: Mode,
    attention_saves_scores: bool,
    param_bytes: int,
    activation_bytes: int,
    autocast: bool = False,
    tp: int = 1,
    checkpoint_every: int | None = None,
    checkpoint_selective: bool = False,
    on_cpu: bool = False,
) -> MemoryPrediction:
    """Memory of one step of the uncompiled model on one device.

    Args:
        mode: ``forward`` without autograd, ``forward_backward``, or ``train_step`` with AdamW,
            whose two moments have the parameters' dtype, beside a float32 count of steps for
            each tensor. It is meant fused: ``foreach``, PyTorch's default, holds one more copy
            of the parameters while it steps.
        attention_saves_scores: whether attention keeps its S x S probabilities for the
            backward pass, as explicit softmax does, or the log-sum-exp alone.
        param_bytes: per element of parameters, and so of gradients and the residual stream.
        activation_bytes: per element of what linear layers and attention give.
        autocast: whether torch.autocast casts float32 parameters down for each matmul.
        tp: ranks of tensor parallelism, of which this is one; see below.
        checkpoint_every: of how many blocks one keeps its input alone; None checkpoints none.
        checkpoint_selective: whether such a block keeps what its linear layers and fused
            attention give as well.
        on_cpu: whether each RMSNorm keeps its normalised input besides, T E r.

    What autograd saves, for T = B S tokens, r = param_bytes, a = activation_bytes; copies that
    share storage count once. RMSNorm and softmax cross-entropy are PyTorch's fused ones on
    CUDA.

    ========================  ================================================================
    each block                bytes
    ========================  ================================================================
    inputs of 2 RMSNorms      2 T E r
    inputs of q, k, v         T E a, shared; under autocast each casts its own, 3 T E a
    inputs of w1, w3          T E a, shared; under autocast 2 T E a
    q, k, v                   T (H + 2 G) D a; with explicit scores k and v repeated, 3 T H D a
    probabilities             B H S^2 a and a bool mask S^2; autocast's softmax is in float32,
                              kept beside its low-precision copy, B H S^2 (4 + a)
    or log-sum-exp            4 T H
    o, the input of o_proj    T E a
    w1, w3, silu, product     4 T F a
    ========================  ================================================================

    Beside the blocks: inputs of the last norm and of the head, T E (r + a); tokens and targets,
    16 T; log-softmax of the logits, 4 T V; under autocast a low-precision copy of every linear
    weight, kept until autocast exits. The backward pass begins with the peak: the gradients of
    the log-softmax and of the logits are 8 T V more.

    With tensor parallelism, by :mod:`parallel.tensor`, each rank has 1 / tp of every
    weight but the norms', of heads H and G, of F and of V; and of the tokens T in the residual
    stream and the inputs of norms. Inputs of q, k, v, of w1, w3 and of the head are of all
    tokens, one copy in each place also under autocast, since they are cast before they are
    gathered. The loss keeps probabilities instead of log-softmax, and its backward pass makes
    their gradient alone, and a copy of it in the logits' dtype.
    """
    step = _Step(
        config=config,
        batch_size=batch_size,
        seq_len=seq_len,
        saves_scores=attention_saves_scores,
        residual_bytes=param_bytes,
        activation_bytes=activation_bytes,
        autocast=autocast,
        tp=tp,
        checkpoint_every=checkpoint_every,
        checkpoint_selective=checkpoint_selective,
        on_cpu=on_cpu,
    )
    sizes = parameter_sizes(config, tp)
    parameters = float(sum(sizes) * param_bytes)
    gradients, optimizer_state = parameters, 0.0
    saved = recomputed = 0.0
    match mode:
        case "forward":
            gradients, activations = 0.0, step.weight_copies() + step.working_set()
        case "forward_backward" | "train_step":
            saved, recomputed = step.saved(), step.recomputed()
            activations = max(step.largest(), saved + recomputed)
            if mode == "train_step":
                optimizer_state = 2 * parameters + _FLOAT32_BYTES * len(sizes)
        case _:
            assert_never(mode)
    return MemoryPrediction(
        parameters=parameters,
        gradients=gradients,
        optimizer_state=optimizer_state,
        activations=activations,
        saved=saved,
        recomputed=recomputed,
    )


@dataclass(kw_only=True, slots=True, frozen=True)
class _Step:
    """The terms of :func:`predict_memory`, in bytes."""

    config: ModelConfig
    batch_size: int
    seq_len: int
    saves_scores: bool
    residual_bytes: int
    activation_bytes: int
    autocast: bool
    tp: int
    checkpoint_every: int | None
    checkpoint_selective: bool
    on_cpu: bool

    @property
    def tokens(self) -> int:
        return self.batch_size * self.seq_len

    @property
    def scores(self) -> float:
        """Elements of one block's score matrices."""
        return self.batch_size * self.config.num_heads / self.tp * self.seq_len**2

    @property
    def num_checkpointed(self) -> int:
        every = self.checkpoint_every
        return self.config.num_layers // every if every else 0

    def weight_copies(self) -> float:
        """Low-precision copies of all linear weights, which autocast keeps until it exits."""
        linear = count_parameters(self.config).linear / self.tp
        return linear * self.activation_bytes if self.autocast else 0

    def _weight_copies_of_block(self) -> float:
        count = count_parameters(self.config)
        per_block = (count.attention + count.feed_forward) / self.config.num_layers / self.tp
        return per_block * self.activation_bytes if self.autocast else 0

    def loss_gradients(self) -> float:
        logit_bytes = 2 * _FLOAT32_BYTES
        if self.tp > 1:
            copy = self.activation_bytes if self.activation_bytes < _FLOAT32_BYTES else 0
            logit_bytes = _FLOAT32_BYTES + copy
        return logit_bytes * self.tokens * self.config.vocab_size / self.tp

    def largest(self) -> float:
        """When the backward pass begins, or when autocast is about to drop copies of weights."""
        copies_dropped = self.num_checkpointed * self._weight_copies_of_block()
        return self.saved() + max(copies_dropped, self.loss_gradients())

    def saved(self) -> float:
        """All that is kept for the backward pass when the forward pass has ended."""
        config = self.config
        outside_blocks = self.tokens * (
            config.d_model * (self.residual_bytes + self._norm_copy_bytes()) / self.tp
            + config.d_model * self.activation_bytes
            + 2 * _INT64_BYTES
            + config.vocab_size / self.tp * _FLOAT32_BYTES
        )
        checkpointed = self.num_checkpointed
        return (
            outside_blocks
            + (config.num_layers - checkpointed) * self._saved_by_block()
            + checkpointed * self._kept_by_checkpoint()
            + self.weight_copies()
            - checkpointed * self._weight_copies_of_block()
        )

    def recomputed(self) -> float:
        """What a checkpointed block makes again, beyond what it kept."""
        if not self.num_checkpointed:
            return 0.0
        again = self._saved_by_block() - self._kept_by_checkpoint()
        return again + self._weight_copies_of_block()

    def _saved_by_block(self) -> float:
        return self._saved_by_projections() + self._saved_by_attention()

    def _kept_by_checkpoint(self) -> float:
        """A block's input; selectively, what its seven linear layers and its attention give."""
        config = self.config
        kept = self.tokens * config.d_model / self.tp * self.residual_bytes
        if not self.checkpoint_selective:
            return kept
        # Row-parallel layers, o_proj and w2, give parts of sums for all tokens.
        features = 2 * config.d_model + 2 * config.d_ff / self.tp
        features += (config.num_heads + 2 * config.kv_heads) / self.tp * config.head_dim
        kept += self.tokens * features * self.activation_bytes
        if not self.saves_scores:
            kept += self.tokens * config.d_model / self.tp * self.activation_bytes
            kept += self.tokens * config.num_heads / self.tp * _FLOAT32_BYTES
        return kept

    def _saved_by_projections(self) -> float:
        config = self.config
        # Under tensor parallelism each input is cast once, before it is gathered.
        num_inputs = 5 if self.autocast and self.tp == 1 else 2
        residual = 2 * config.d_model / self.tp * (self.residual_bytes + self._norm_copy_bytes())
        wide = num_inputs * config.d_model + 4 * config.d_ff / self.tp
        return self.tokens * (residual + wide * self.activation_bytes)

    def _norm_copy_bytes(self) -> int:
        """An element of what RMSNorm on a CPU keeps besides: in low precision, wide copies too."""
        if not self.on_cpu:
            return 0
        wide = _FLOAT32_BYTES if self.residual_bytes < _FLOAT32_BYTES else 0
        return self.residual_bytes + wide

    def _saved_by_attention(self) -> float:
        config = self.config
        heads = config.num_heads / self.tp
        kv_heads = heads if self.saves_scores else config.kv_heads / self.tp
        qkvo_bytes = 2 * (heads + kv_heads) * config.head_dim * self.activation_bytes
        if not self.saves_scores:
            return self.tokens * (qkvo_bytes + heads * _FLOAT32_BYTES)
        # Autocast for CPUs leaves softmax in low precision.
        widened = self.autocast and not self.on_cpu
        score_bytes = self.activation_bytes + (_FLOAT32_BYTES if widened else 0)
        return self.tokens * qkvo_bytes + self.scores * score_bytes + self.seq_len**2

    def working_set(self) -> float:
        """The most that a forward pass without autograd holds at once.

        That is the residual stream, a norm's output, and the largest of three: q and k before
        and after RoPE, v, and the softmax's input and output; silu, w3 and their product; or,
        once the stream has ended, the logits, in float32, and their log-softmax.
        """
        config, low = self.config, self.activation_bytes
        stream_and_norm = 2 * self.tokens * config.d_model * self.residual_bytes / self.tp
        # What a rank has gathered of other ranks' tokens, as long as it is in use.
        gathered = self.tokens * config.d_model * low if self.tp > 1 else 0
        heads = (2 * config.num_heads + 3 * config.kv_heads) / self.tp
        attention = self.tokens * heads * config.head_dim * low
        if self.saves_scores:
            widened = self.autocast and not self.on_cpu
            attention += self.scores * (low + 2 * _FLOAT32_BYTES if widened else 2 * low)
        feed_forward = 3 * self.tokens * config.d_ff / self.tp * low
        loss_bytes = low + _FLOAT32_BYTES + (0 if low == _FLOAT32_BYTES else _FLOAT32_BYTES)
        loss = self.tokens * config.vocab_size / self.tp * loss_bytes
        return gathered + max(stream_and_norm + max(attention, feed_forward), loss)
