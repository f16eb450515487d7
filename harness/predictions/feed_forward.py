"""Memory and communication of a stack of feed-forward blocks on a mesh, by formula.

CS336 assignment 2, problem communication_accounting: blocks of two linear layers, d_model to
d_ff and back; activations and what is sent in bfloat16, master weights, accumulated gradients
and AdamW's state in float32. Times are those of the Scaling Book (Austin et al. 2025), part 5,
for the two matrices of a block, forward, on N = X Y chips, of B tokens in all::

    compute               4 B D F / (N C)
    gather weights        4 D F / (Y W M_X)      over the X chips of the FSDP axis
    exchange activations  4 B D / (X W M_Y)      over the Y chips of the tensor-parallel axis

Computing hides both when it outlasts the longer of them, and, where they take turns on the
links, when it outlasts their sum. The longer of them is least where they are equal, at
X = sqrt(B N M_X / (F M_Y)); computing outlasts it there from B = N (C / W)^2 / (M_X M_Y F) on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

WEIGHT_BYTES, GRADIENT_BYTES, STATE_BYTES = 4, 4, 8
"""Per element, in float32; AdamW keeps two moments."""

ACTIVATION_BYTES = 2
"""bfloat16."""


@dataclass(kw_only=True, slots=True, frozen=True)
class FeedForwardStack:
    """Feed-forward blocks of one size."""

    d_model: int
    d_ff: int
    num_blocks: int

    @property
    def num_parameters(self) -> int:
        return self.num_blocks * 2 * self.d_model * self.d_ff

    @property
    def static_bytes(self) -> int:
        """Master weights, accumulated gradients and optimizer state."""
        return self.num_parameters * (WEIGHT_BYTES + GRADIENT_BYTES + STATE_BYTES)

    @property
    def activation_bytes_per_token(self) -> int:
        """Inputs of both layers of every block, which their backward pass needs."""
        return self.num_blocks * (self.d_model + self.d_ff) * ACTIVATION_BYTES

    def least_shards(self, device_bytes: float, tokens: int) -> int | None:
        """The fewest devices whose memory is enough; None if no number is.

        Static memory is sharded, and half of the activations of ``tokens``; the other half is on
        every device.
        """
        half = self.activation_bytes_per_token * tokens / 2
        room = device_bytes - half
        return math.floor((self.static_bytes + half) / room) + 1 if room > 0 else None


@dataclass(kw_only=True, slots=True, frozen=True)
class Mesh:
    """X x Y chips, their speed, and that of the links along each mesh axis."""

    fsdp: int
    """X."""
    tp: int
    """Y."""
    fsdp_axes: int
    """M_X: axes of the network that the FSDP axis is laid along."""
    tp_axes: int
    """M_Y."""
    flops_per_s: float
    """C of one chip."""
    bytes_per_s: float
    """W of one axis of the network, both ways."""

    @property
    def num_devices(self) -> int:
        return self.fsdp * self.tp

    def gather_s(self, stack: FeedForwardStack) -> float:
        """Time to gather one block's weights over the FSDP axis."""
        size = 2 * stack.d_model * stack.d_ff * ACTIVATION_BYTES
        return size / (self.tp * self.bytes_per_s * self.fsdp_axes)

    def least_batch(self) -> float:
        """Tokens in all above which computing outlasts gathering weights: N C / (Y W M_X)."""
        links = self.tp * self.bytes_per_s * self.fsdp_axes
        return self.num_devices * self.flops_per_s / links

    def least_d_ff(self) -> float:
        """d_ff above which computing outlasts exchanging activations, whatever the batch."""
        return self.num_devices * self.flops_per_s / (self.fsdp * self.bytes_per_s * self.tp_axes)

    def least_batch_in_turns(self, d_ff: int) -> float | None:
        """Tokens above which computing outlasts both, one after the other; None if it never does.

        B (1 - N C / (X W M_Y F)) > N C / (Y W M_X).
        """
        left = 1 - self.least_d_ff() / d_ff
        return self.least_batch() / left if left > 0 else None

    def least_batch_of_any_split(self, d_ff: int) -> float:
        """Tokens above which some split of the devices hides both: N (C / W)^2 / (M_X M_Y F).

        X and Y are taken for numbers of any size; ``best_split`` takes whole ones.
        """
        ratio = self.flops_per_s / self.bytes_per_s
        return self.num_devices * ratio**2 / (self.fsdp_axes * self.tp_axes * d_ff)

    def best_split(self, d_ff: int) -> Mesh | None:
        """The X x Y of as many devices that hides both from the smallest batch on.

        The axes of the network stay as they are; None where the exchange outlasts computing in
        every split.
        """
        count = self.num_devices
        splits = [
            replace(self, fsdp=fsdp, tp=count // fsdp)
            for fsdp in range(1, count + 1)
            if count % fsdp == 0
        ]
        hiding = [split for split in splits if split.least_d_ff() < d_ff]
        return min(hiding, key=Mesh.least_batch, default=None)
