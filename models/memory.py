"""Memory of one training step of the transformer on one device, by formula, without torch.

The model is not compiled. Autograd saves, for T = B S tokens, r = stream_bytes and
a = activation_bytes, the tensors of this table; copies that share storage count once. RMSNorm
and softmax cross-entropy are PyTorch's fused ones on CUDA.

========================  ================================================================
each block                bytes
========================  ================================================================
inputs of 2 RMSNorms      2 T E r
inputs of q, k, v         T E a, shared; under autocast each casts its own, 3 T E a
inputs of w1, w3          T E a, shared; under autocast 2 T E a
q, k, v                   T (H + 2 G) D a; with explicit scores k and v repeated, 3 T H D a
probabilities             B H S^2 a and a bool mask S^2; autocast's softmax is in float32,
                          kept beside its low-precision copy, B H S^2 (4 + a)
                          with a cap of scores its tanh, B H S^2 a, of float16 in float32,
                          4 B H S^2; with sinks a column more
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

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, assert_never

from models.accounting import count_parameters, parameter_sizes
from models.config import ModelConfig
from models.variants import PLAIN, AttentionVariant

Mode = Literal["forward", "forward_backward", "train_step"]

_FLOAT32_BYTES = 4
_INT64_BYTES = 8


@dataclass(kw_only=True, slots=True, frozen=True)
class MemoryPrediction:
    """Peak bytes of each category on one device; not all peak at once."""

    parameters: float
    gradients: float
    optimizer_state: float
    activations: float
    """Saved by autograd, with the loss's gradients; without a backward pass, the working set."""
    saved: float = 0.0
    """The activations that are held when the forward pass ends."""
    recomputed: float = 0.0
    """Activations that a checkpointed block saves again, while all gradients fill up."""
    of_block: float = 0.0
    """What each block has of :attr:`saved`, copies of its weights included."""

    @property
    def gradients_or_activations(self) -> float:
        """The larger of the two: the backward pass frees activations while it fills gradients.

        This holds where each step starts without gradients, as after
        ``zero_grad(set_to_none=True)``.
        """
        return max(self.gradients + self.recomputed, self.activations)

    @property
    def total(self) -> float:
        """Bytes at the peak, which is less than the sum of the parts."""
        return self.parameters + self.optimizer_state + self.gradients_or_activations


@dataclass(kw_only=True, slots=True, frozen=True)
class TrainingStep:
    """A step whose memory is to be predicted."""

    config: ModelConfig
    batch_size: int
    seq_len: int
    mode: Mode
    """``forward`` without autograd, ``forward_backward``, or ``train_step`` with fused AdamW.

    AdamW's two moments have the parameters' dtype, beside a float32 count of steps for each
    tensor. Its ``foreach`` implementation, PyTorch's default, holds one more copy of the
    parameters while it steps."""
    attention_saves_scores: bool
    """Whether attention keeps its S x S probabilities for the backward pass, as explicit softmax
    does, or the log-sum-exp alone."""
    param_bytes: int
    """Per element of parameters, and so of gradients."""
    activation_bytes: int
    """Per element of the outputs of linear layers and attention."""
    stream_bytes: int | None = None
    """Per element of the residual stream; None where it has the parameters' dtype."""
    capped_bytes: int | None = None
    """Per element of scores on their way through a cap; None where it is ``activation_bytes``."""
    autocast: bool = False
    """Whether torch.autocast casts float32 parameters down for each matmul."""
    tp: int = 1
    """Ranks of tensor parallelism; the prediction is for one of them."""
    checkpoint_every: int | None = None
    """Every how many blocks one keeps its input alone; None checkpoints none."""
    checkpoint_selective: bool = False
    """Whether such a block also keeps the outputs of its linear layers and fused attention."""
    on_cpu: bool = False
    """Whether each RMSNorm keeps its normalised input besides, T E r."""
    variant: AttentionVariant = PLAIN
    """Of attention; sinks are parameters."""

    def predict_memory(self) -> MemoryPrediction:
        """Peak bytes of each category."""
        sizes = parameter_sizes(self.config, self.tp, self.variant)
        parameters = float(sum(sizes) * self.param_bytes)
        gradients, optimizer_state = parameters, 0.0
        saved = recomputed = of_block = 0.0
        match self.mode:
            case "forward":
                gradients, activations = 0.0, self._weight_copies() + self._working_set()
            case "forward_backward" | "train_step":
                saved, recomputed = self._saved(), self._recomputed()
                activations = max(self._largest(), saved + recomputed)
                of_block = self._held_by_block()
                if self.mode == "train_step":
                    optimizer_state = 2 * parameters + _FLOAT32_BYTES * len(sizes)
            case _:
                assert_never(self.mode)
        return MemoryPrediction(
            parameters=parameters,
            gradients=gradients,
            optimizer_state=optimizer_state,
            activations=activations,
            saved=saved,
            recomputed=recomputed,
            of_block=of_block,
        )

    @property
    def _stream(self) -> int:
        return self.param_bytes if self.stream_bytes is None else self.stream_bytes

    @property
    def _tokens(self) -> int:
        return self.batch_size * self.seq_len

    @property
    def _scores(self) -> float:
        """Elements of one block's score matrices."""
        return self.batch_size * self.config.num_heads / self.tp * self.seq_len**2

    @property
    def _num_checkpointed(self) -> int:
        every = self.checkpoint_every
        return self.config.num_layers // every if every else 0

    def _weight_copies(self) -> float:
        """Low-precision copies of all linear weights, which autocast keeps until it exits."""
        linear = count_parameters(self.config).linear / self.tp
        return linear * self.activation_bytes if self.autocast else 0

    def _weight_copies_of_block(self) -> float:
        count = count_parameters(self.config)
        per_block = (count.attention + count.feed_forward) / self.config.num_layers / self.tp
        return per_block * self.activation_bytes if self.autocast else 0

    def _loss_gradients(self) -> float:
        logit_bytes = 2 * _FLOAT32_BYTES
        if self.tp > 1:
            copy = self.activation_bytes if self.activation_bytes < _FLOAT32_BYTES else 0
            logit_bytes = _FLOAT32_BYTES + copy
        return logit_bytes * self._tokens * self.config.vocab_size / self.tp

    def _largest(self) -> float:
        """Activations when the backward pass begins, or when autocast drops copies of weights."""
        copies_dropped = self._num_checkpointed * self._weight_copies_of_block()
        return self._saved() + max(copies_dropped, self._loss_gradients())

    def _saved(self) -> float:
        """Activations kept for the backward pass when the forward pass has ended."""
        config = self.config
        outside_blocks = self._tokens * (
            config.d_model * (self._stream + self._norm_copy_bytes()) / self.tp
            + config.d_model * self.activation_bytes
            + 2 * _INT64_BYTES
            + config.vocab_size / self.tp * _FLOAT32_BYTES
        )
        checkpointed = self._num_checkpointed
        return (
            outside_blocks
            + (config.num_layers - checkpointed) * self._saved_by_block()
            + checkpointed * self._kept_by_checkpoint()
            + self._weight_copies()
            - checkpointed * self._weight_copies_of_block()
        )

    def _recomputed(self) -> float:
        """Activations that a checkpointed block computes again."""
        if not self._num_checkpointed:
            return 0.0
        again = self._saved_by_block() - self._kept_by_checkpoint()
        return again + self._weight_copies_of_block() + self._softmax_backward()

    def _softmax_backward(self) -> float:
        """Bytes by which a block's explicit softmax, in its backward pass, exceeds what it saved.

        PyTorch's softmax (SoftMax.cu) holds the gradient of the probabilities, its product with
        them and the gradient of the scores. What comes after it in the block is freed by then:
        the feed-forward layer, and under autocast the low-precision probabilities.
        """
        if not self.attention_saves_scores:
            return 0.0
        config, low = self.config, self.activation_bytes
        widened = self.autocast and not self.on_cpu
        score_bytes = 3 * _FLOAT32_BYTES - low if widened else 3 * low
        num_inputs = 3 if self.autocast and self.tp == 1 else 2
        freed = config.d_model / self.tp * self._stream
        freed += (num_inputs * config.d_model + 4 * config.d_ff / self.tp) * low
        return max(0.0, self._scores * score_bytes - self._tokens * freed)

    def _held_by_block(self) -> float:
        """What the backward pass of a block frees of what was saved."""
        if self._num_checkpointed:
            return self._kept_by_checkpoint()
        return self._saved_by_block() + self._weight_copies_of_block()

    def _saved_by_block(self) -> float:
        return self._saved_by_projections() + self._saved_by_attention()

    def _kept_by_checkpoint(self) -> float:
        """A block's input; if selective, the outputs of its linear layers and attention too."""
        config = self.config
        kept = self._tokens * config.d_model / self.tp * self._stream
        if not self.checkpoint_selective:
            return kept
        # Row-parallel layers, o_proj and w2, give parts of sums for all tokens.
        features = 2 * config.d_model + 2 * config.d_ff / self.tp
        features += (config.num_heads + 2 * config.kv_heads) / self.tp * config.head_dim
        kept += self._tokens * features * self.activation_bytes
        if not self.attention_saves_scores:
            kept += self._tokens * config.d_model / self.tp * self.activation_bytes
            kept += self._tokens * config.num_heads / self.tp * _FLOAT32_BYTES
        return kept

    def _saved_by_projections(self) -> float:
        config = self.config
        # Under tensor parallelism each input is cast once, before it is gathered.
        num_inputs = 5 if self.autocast and self.tp == 1 else 2
        residual = 2 * config.d_model / self.tp * (self._stream + self._norm_copy_bytes())
        wide = num_inputs * config.d_model + 4 * config.d_ff / self.tp
        return self._tokens * (residual + wide * self.activation_bytes)

    def _norm_copy_bytes(self) -> int:
        """Bytes per element that RMSNorm on a CPU keeps besides, wide copies included."""
        if not self.on_cpu:
            return 0
        wide = _FLOAT32_BYTES if self._stream < _FLOAT32_BYTES else 0
        return self._stream + wide

    def _saved_by_attention(self) -> float:
        config = self.config
        heads = config.num_heads / self.tp
        kv_heads = heads if self.attention_saves_scores else config.kv_heads / self.tp
        qkvo_bytes = 2 * (heads + kv_heads) * config.head_dim * self.activation_bytes
        if not self.attention_saves_scores:
            return self._tokens * (qkvo_bytes + heads * _FLOAT32_BYTES)
        # Autocast for CPUs leaves softmax in low precision.
        widened = self.autocast and not self.on_cpu
        score_bytes = self.activation_bytes + (_FLOAT32_BYTES if widened else 0)
        if self.variant.softcap is not None:
            score_bytes += self.capped_bytes or self.activation_bytes
        column = 0.0
        if self.variant.sinks:
            column = self._tokens * heads * (_FLOAT32_BYTES if widened else self.activation_bytes)
        return self._tokens * qkvo_bytes + self._scores * score_bytes + column + self.seq_len**2

    def _working_set(self) -> float:
        """The most that a forward pass without autograd holds at once.

        That is the residual stream, a norm's output, and the largest of three: q and k before
        and after RoPE, v, and the softmax's input and output; silu, w3 and their product; or,
        once the stream has ended, the logits, in float32, and their log-softmax.
        """
        config, low = self.config, self.activation_bytes
        stream_and_norm = 2 * self._tokens * config.d_model * self._stream / self.tp
        # Other ranks' tokens, gathered for as long as they are in use.
        gathered = self._tokens * config.d_model * low if self.tp > 1 else 0
        heads = (2 * config.num_heads + 3 * config.kv_heads) / self.tp
        attention = self._tokens * heads * config.head_dim * low
        if self.attention_saves_scores:
            widened = self.autocast and not self.on_cpu
            # Scores with their quotient by the cap and its tanh, or the softmax.
            capping = low + 2 * (self.capped_bytes or low) if self.variant.softcap else 0
            softmax = low + 2 * _FLOAT32_BYTES if widened else 2 * low
            attention += self._scores * max(capping, softmax)
        feed_forward = 3 * self._tokens * config.d_ff / self.tp * low
        loss_bytes = low + _FLOAT32_BYTES + (0 if low == _FLOAT32_BYTES else _FLOAT32_BYTES)
        loss = self._tokens * config.vocab_size / self.tp * loss_bytes
        return gathered + max(stream_and_norm + max(attention, feed_forward), loss)
