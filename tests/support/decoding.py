"""A decoding step defined in float64, one sequence at a time: the reference of tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kernels import BACKENDS, AttentionBackend
from kernels.caches import CACHES, CacheShape
from kernels.decoding import DecodeProblem, LatentInputs
from kernels.rotary import Rotary, rotary_table


def backend_of(name: str, **options: Any) -> AttentionBackend:
    entry = BACKENDS[name]
    return entry.target(name=name, **{**entry.preset, **options})


def problem_of(**changes: Any) -> DecodeProblem:
    """A step of Llama 3 8B on a GPU, to be asked about and not run."""
    values: dict[str, Any] = {
        "batch_size": 2,
        "num_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 128,
        "new_tokens": 1,
        "max_len": 512,
        "dtype": "bfloat16",
        "device": "cuda",
    }
    return DecodeProblem(**(values | changes))


def rotated(x: Tensor, positions: Tensor, rotary: Rotary | None) -> Tensor:
    """x [..., T, D] turned in the complex plane, pair by pair."""
    x = x.double()
    if rotary is None:
        return x
    turn = torch.complex(rotary.cos[positions].double(), rotary.sin[positions].double())
    pairs = turn.shape[-1]
    if rotary.interleaved:
        parts = torch.view_as_complex(x.unflatten(-1, (pairs, 2)).contiguous()) * turn
        return torch.view_as_real(parts).flatten(-2)
    parts = torch.complex(x[..., :pairs], x[..., pairs:]) * turn
    return torch.cat((parts.real, parts.imag), dim=-1)


def softmax_attention(q_TD: Tensor, k_KD: Tensor, v_KD: Tensor, scale: float) -> Tensor:
    """One head; new token t of T sees all keys but the last T - 1 - t."""
    rows = []
    for index, q_D in enumerate(q_TD):
        seen = len(k_KD) - len(q_TD) + 1 + index
        rows.append((k_KD[:seen] @ q_D * scale).softmax(dim=0) @ v_KD[:seen])
    return torch.stack(rows)


@dataclass(kw_only=True)
class Step:
    """A random step over caches that hold ``lengths`` tokens, and its result by definition."""

    lengths: Sequence[int]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 8
    new_tokens: int = 1
    block_size: int | None = None
    rotary: str = "interleaved"
    kv_lora_rank: int = 0
    rope_head_dim: int = 0
    dtype: str = "float32"
    device: str = "cpu"
    layers: int = 2
    spare: int = 3
    """Places behind the longest sequence's new tokens."""
    cuda_graph: bool = False
    seed: int = 0
    inputs: tuple[Any, ...] = field(init=False)
    cache: Any = field(init=False)

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        latent = self.kv_lora_rank > 0
        self.max_len = max(self.lengths) + self.new_tokens + self.spare
        name = "latent" if latent else "contiguous" if self.block_size is None else "paged"
        options = {} if name == "contiguous" else {"block_size": self.block_size}
        choice = CACHES[name].target(name=name, **options)
        self.cache = choice.allocate(
            CacheShape(
                num_layers=self.layers,
                batch_size=len(self.lengths),
                max_len=self.max_len,
                num_kv_heads=1 if latent else self.num_kv_heads,
                head_dim=1 if latent else self.head_dim,
                kv_lora_rank=self.kv_lora_rank,
                rope_head_dim=self.rope_head_dim,
                dtype=self.dtype,
            ),
            self.device,
            seed=self.seed,
        )
        for storage in self.cache.latents if latent else (*self.cache.keys, *self.cache.values):
            storage.normal_()
        self.cache.places.fill(self.lengths)
        self.cache.places.reserve(self.new_tokens)
        self.table = None
        if self.rotary != "none":
            self.table = rotary_table(
                self.cache.places.capacity,
                self.rope_head_dim or self.head_dim,
                interleaved=self.rotary == "interleaved",
                device=self.device,
            )
        self.inputs = self._latent_inputs() if latent else self._inputs()
        self.scale = (self.head_dim + self.rope_head_dim) ** -0.5

    @property
    def problem(self) -> DecodeProblem:
        return DecodeProblem(
            batch_size=len(self.lengths),
            num_heads=self.num_heads,
            num_kv_heads=1 if self.kv_lora_rank else self.num_kv_heads,
            head_dim=self.head_dim,
            new_tokens=self.new_tokens,
            max_len=self.max_len,
            dtype=self.dtype,
            device=self.device,
            block_size=self.block_size,
            kv_lora_rank=self.kv_lora_rank,
            rope_head_dim=self.rope_head_dim,
            rotary=self.rotary,
            cuda_graph=self.cuda_graph,
        )

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=getattr(torch, self.dtype), device=self.device)

    def _inputs(self) -> tuple[Any, ...]:
        batch, new, dim = len(self.lengths), self.new_tokens, self.head_dim
        heads = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        return tuple(self.random(batch, number, new, dim) for number in heads)

    def _latent_inputs(self) -> tuple[Any, ...]:
        batch, new, heads = len(self.lengths), self.new_tokens, self.num_heads
        inputs = LatentInputs(
            q_BHTD=self.random(batch, heads, new, self.head_dim),
            q_rope=self.random(batch, heads, new, self.rope_head_dim),
            c_BTR=self.random(batch, new, self.kv_lora_rank),
            k_rope=self.random(batch, new, self.rope_head_dim),
            up_k_HDR=self.random(heads, self.head_dim, self.kv_lora_rank) / 4,
            up_v_HDR=self.random(heads, self.head_dim, self.kv_lora_rank) / 4,
        )
        return (inputs,)

    def decoder(self, backend: AttentionBackend) -> Any:
        return backend.decoder(self.problem, self.cache, rotary=self.table, scale=self.scale)

    def run(self, backend: AttentionBackend, layer: int = 1) -> Tensor:
        """The backend's output of one layer; lengths stay."""
        decoder = self.decoder(backend)
        decoder.plan()
        decoder.begin()
        o: Tensor = decoder(layer, *self.inputs)
        return o

    def expected(self, layer: int = 1) -> tuple[Tensor, list[Any]]:
        """o [B, H, T, D], and what each sequence's cache holds afterwards, in float64.

        Computed from the cache as it is now, so before the step is run.
        """
        one = self._expected_latent if self.kv_lora_rank else self._expected
        found = [one(layer, index, length) for index, length in enumerate(self.lengths)]
        return torch.stack([o for o, _ in found]), [held for _, held in found]

    def _expected(self, layer: int, index: int, length: int) -> tuple[Tensor, Any]:
        q, k_new, v_new = (x[index] for x in self.inputs)
        positions = torch.arange(length, length + self.new_tokens, device=q.device)
        k, v = (x.double() for x in self.cache.sequence(layer, index, length))
        k = torch.cat((k, rotated(k_new, positions, self.table)), dim=1)
        v = torch.cat((v, v_new.double()), dim=1)
        q = rotated(q, positions, self.table)
        group = self.num_heads // self.num_kv_heads
        heads = [
            softmax_attention(q[head], k[head // group], v[head // group], self.scale)
            for head in range(self.num_heads)
        ]
        return torch.stack(heads), (k, v)

    def _expected_latent(self, layer: int, index: int, length: int) -> tuple[Tensor, Any]:
        inputs = self.inputs[0]
        device = inputs.c_BTR.device
        positions = torch.arange(length, length + self.new_tokens, device=device)
        rope_new = rotated(inputs.k_rope[index], positions, self.table)
        new = torch.cat((inputs.c_BTR[index].double(), rope_new), dim=-1)
        rows = torch.cat((self.cache.sequence(layer, index, length).double(), new))
        c, rope = rows[:, : self.kv_lora_rank], rows[:, self.kv_lora_rank :]
        q_rope = rotated(inputs.q_rope[index], positions, self.table)
        heads = []
        for head in range(self.num_heads):
            k = torch.cat((c @ inputs.up_k_HDR[head].double().T, rope), dim=-1)
            v = c @ inputs.up_v_HDR[head].double().T
            q = torch.cat((inputs.q_BHTD[index, head].double(), q_rope[head]), dim=-1)
            heads.append(softmax_attention(q, k, v, self.scale))
        return torch.stack(heads), rows

    def check(self, backend: AttentionBackend, *, tolerance: float = 1e-5) -> None:
        """A step gives what it should, and leaves in the cache what it should, and nothing else."""
        expected, held = self.expected()
        o = self.run(backend)
        torch.testing.assert_close(o.double(), expected, rtol=tolerance, atol=tolerance)
        for index, rows in enumerate(held):
            length = self.lengths[index] + self.new_tokens
            found = self.cache.sequence(1, index, length)
            for got, want in zip(
                found if isinstance(found, tuple) else (found,),
                rows if isinstance(rows, tuple) else (rows,),
                strict=True,
            ):
                torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)
        assert self.cache.places.lengths.tolist() == list(self.lengths)
