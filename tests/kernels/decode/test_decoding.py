"""Steps from caches against their definition in float64, for every backend that runs here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decoding import Step, backend_of, problem_of, rotated
from grids import covering
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import BACKENDS, Attention, AttentionProblem
from kernels.backends.auto import CHAINS, DECODE_CHAINS, choose_decode, decode_chain_of
from kernels.launching.graphs import GraphedStep, require_static
from kernels.rotary import Rotary, apply_rotary, rotary_table

KEY_VALUE = ("standard", "sdpa", "sdpa_math", "auto", "flash_decode")
LATENT = ("mla_absorbed", "mla_materialised", "auto")

EDGES = [0, 1, 3, 4, 5, 7, 8, 9]
"""Around the boundaries of blocks of 4."""

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def check(name: str, step: Step, **options: Any) -> None:
    backend = backend_of(name)
    reason = backend.supports_decode(step.problem)
    if reason is not None:
        pytest.skip(reason)
    step.check(backend, **options)


@pytest.mark.parametrize("name", KEY_VALUE)
class TestKeysAndValues:
    @pytest.mark.parametrize("block_size", [None, 4])
    @pytest.mark.parametrize("new_tokens", [1, 3])
    @pytest.mark.parametrize("rotary", ["interleaved", "halves", "none"])
    def test_ragged_lengths(
        self, name: str, block_size: int | None, new_tokens: int, rotary: str
    ) -> None:
        step = Step(lengths=EDGES, block_size=block_size, new_tokens=new_tokens, rotary=rotary)
        check(name, step)

    @pytest.mark.parametrize("group", [1, 2, 8, 16])
    def test_grouped_queries(self, name: str, group: int) -> None:
        check(name, Step(lengths=[5, 2], num_heads=16, num_kv_heads=16 // group))

    @pytest.mark.parametrize("head_dim", [64, 128, 256])
    def test_head_dims(self, name: str, head_dim: int) -> None:
        check(name, Step(lengths=[9, 0], head_dim=head_dim, num_heads=2, num_kv_heads=1))

    @pytest.mark.parametrize("lengths", [[0], [1], [6, 6, 6]])
    def test_equal_lengths(self, name: str, lengths: list[int]) -> None:
        check(name, Step(lengths=lengths, block_size=2))

    def test_as_a_graph_would_look_at_it(self, name: str) -> None:
        """All places, behind a mask: what lies behind the last token is random here."""
        check(name, Step(lengths=[2, 9], cuda_graph=True, spare=9))


@pytest.mark.parametrize("name", LATENT)
@pytest.mark.parametrize("block_size", [None, 4])
class TestLatents:
    @pytest.mark.parametrize("new_tokens", [1, 3])
    @pytest.mark.parametrize("rotary", ["interleaved", "halves"])
    def test_ragged_lengths(
        self, name: str, block_size: int | None, new_tokens: int, rotary: str
    ) -> None:
        sizes = {"kv_lora_rank": 16, "rope_head_dim": 4}
        step = Step(
            lengths=EDGES, block_size=block_size, new_tokens=new_tokens, rotary=rotary, **sizes
        )
        check(name, step, tolerance=1e-4)

    @pytest.mark.parametrize(
        ("new_tokens", "rotary"), [(1, "interleaved"), (3, "halves"), (2, "none")]
    )
    def test_the_kernels_where_they_run(
        self, name: str, block_size: int | None, new_tokens: int, rotary: str
    ) -> None:
        step = Step(
            lengths=[3, 9, 0], block_size=block_size, new_tokens=new_tokens, rotary=rotary,
            kv_lora_rank=16, rope_head_dim=4,
        )  # fmt: skip
        backend = backend_of("mla_absorbed", implementation="triton")
        reason = backend.supports_decode(step.problem)
        if reason is not None or name != "mla_absorbed":
            pytest.skip(reason or "of one backend")
        step.check(backend, tolerance=1e-4)

    @pytest.mark.parametrize("cuda_graph", [False, True])
    def test_equal_lengths(self, name: str, block_size: int | None, cuda_graph: bool) -> None:
        sizes = {"kv_lora_rank": 8, "rope_head_dim": 2, "head_dim": 6}
        step = Step(lengths=[6, 6], block_size=block_size, cuda_graph=cuda_graph, **sizes)
        check(name, step, tolerance=1e-4)


@settings(max_examples=40)
@given(data=st.data())
def test_any_step(data: st.DataObject) -> None:
    group, pairs = data.draw(st.integers(1, 16)), data.draw(st.integers(1, 8))
    heads = data.draw(st.integers(1, 2))
    latent = data.draw(st.booleans())
    step = Step(
        lengths=data.draw(st.lists(st.integers(0, 12), min_size=1, max_size=4)),
        num_heads=heads * group,
        num_kv_heads=heads,
        head_dim=2 * pairs,
        new_tokens=data.draw(st.integers(1, 4)),
        block_size=data.draw(st.none() | st.integers(1, 5)),
        rotary=data.draw(st.sampled_from(("interleaved", "halves", "none"))),
        kv_lora_rank=data.draw(st.integers(1, 9)) if latent else 0,
        rope_head_dim=2 * data.draw(st.integers(1, 3)) if latent else 0,
        cuda_graph=data.draw(st.booleans()),
        spare=data.draw(st.integers(0, 5)),
        seed=data.draw(st.integers(0, 99)),
    )
    names = ("mla_absorbed", "mla_materialised") if latent else ("standard", "sdpa")
    step.check(backend_of(data.draw(st.sampled_from(names))), tolerance=1e-4)


class StandIn:
    """Stand-ins for the functions of kernels.decode, one sequence at a time."""

    def flash_decode(
        self,
        q: Tensor,
        k_new: Tensor,
        v_new: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        lengths: Tensor,
        *,
        block_table: Tensor | None = None,
        rotary: Rotary | None = None,
        scale: float | None = None,
        num_splits: int | None = None,
    ) -> Tensor:
        assert lengths.dtype == torch.int32
        assert scale is not None
        group = q.shape[1] // k_new.shape[1]
        o = torch.empty_like(q)
        for index, length in enumerate(lengths.tolist()):
            positions = torch.arange(length, length + q.shape[2])
            k, v = rotated(k_new[index], positions, rotary), v_new[index]
            for place in range(q.shape[2]):
                row, column = index, length + place
                if block_table is not None:
                    assert block_table.dtype == torch.int32
                    size = k_cache.shape[2]
                    row, column = int(block_table[index, column // size]), column % size
                k_cache[row, :, column] = k[:, place].to(q.dtype)
                v_cache[row, :, column] = v[:, place]
            keys, values = (
                _gathered(x, index, length + q.shape[2], block_table) for x in (k_cache, v_cache)
            )
            keys, values = (x.repeat_interleave(group, 0).double() for x in (keys, values))
            scores = rotated(q[index], positions, rotary) @ keys.mT * scale
            hidden = torch.arange(keys.shape[1]) > positions[:, None]
            o[index] = (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ values).to(q.dtype)
        return o

    def latent_append(
        self,
        q_rope: Tensor,
        c_new: Tensor,
        k_rope: Tensor,
        latent_cache: Tensor,
        lengths: Tensor,
        *,
        block_table: Tensor | None = None,
        rotary: Rotary | None = None,
        lengths_after: Tensor,
    ) -> Tensor:
        turned = torch.empty_like(q_rope)
        new, size = c_new.shape[1], latent_cache.shape[1]
        for index, length in enumerate(lengths.tolist()):
            positions = torch.arange(length, length + new)
            turned[index] = rotated(q_rope[index], positions, rotary)
            k = rotated(k_rope[index], positions, rotary).to(c_new.dtype)
            for place, position in enumerate(positions.tolist()):
                row, column = index, position
                if block_table is not None:
                    row, column = int(block_table[index, position // size]), position % size
                latent_cache[row, column] = torch.cat((c_new[index, place], k[place]))
        lengths_after.copy_(lengths + new)
        return turned

    def mla_decode(
        self,
        q_latent: Tensor,
        q_rope: Tensor,
        latent_cache: Tensor,
        lengths: Tensor,
        *,
        block_table: Tensor | None = None,
        scale: float,
        out: Tensor,
    ) -> Tensor:
        o = out
        new, rank = q_latent.shape[2:]
        for index, length in enumerate(lengths.tolist()):
            rows = _gathered(latent_cache.unsqueeze(1), index, length, block_table)[0].double()
            q = torch.cat((q_latent[index], q_rope[index]), dim=-1).double()
            hidden = torch.arange(length) > torch.arange(length - new, length)[:, None]
            p = (q @ rows.T * scale).masked_fill(hidden, -torch.inf).softmax(-1)
            o[index] = (p @ rows[:, :rank]).to(o.dtype)
        return o


def _gathered(x: Tensor, index: int, length: int, table: Tensor | None) -> Tensor:
    """[G, length, D] of one sequence of a contiguous or paged cache."""
    if table is None:
        return x[index, :, :length]
    return torch.cat(list(x[table[index].long()]), dim=1)[:, :length]


class TestWiringOfFusedKernels:
    """With stand-ins for the kernels, so that arguments are checked without running Triton."""

    @pytest.fixture(autouse=True)
    def kernels_of_python(self, monkeypatch: pytest.MonkeyPatch) -> None:
        stand_in = StandIn()
        for name in ("flash_decode", "latent_append", "mla_decode"):
            monkeypatch.setattr(f"kernels.decode.{name}", getattr(stand_in, name))
        monkeypatch.setattr("kernels.decode.available.why_not_triton", lambda device: None)
        monkeypatch.setattr("kernels.decode.plans.why_not", lambda device, dtype: None)

    @pytest.mark.parametrize("block_size", [None, 4])
    @pytest.mark.parametrize("new_tokens", [1, 2])
    @pytest.mark.parametrize("rotary", ["interleaved", "halves", "none"])
    def test_flash_decode(self, block_size: int | None, new_tokens: int, rotary: str) -> None:
        step = Step(lengths=EDGES, block_size=block_size, new_tokens=new_tokens, rotary=rotary)
        step.check(backend_of("flash_decode"))

    @pytest.mark.parametrize("block_size", [None, 4])
    @pytest.mark.parametrize("new_tokens", [1, 2])
    def test_mla_decode(self, block_size: int | None, new_tokens: int) -> None:
        sizes = {"kv_lora_rank": 16, "rope_head_dim": 4}
        step = Step(lengths=EDGES, block_size=block_size, new_tokens=new_tokens, **sizes)
        backend = backend_of("mla_absorbed", implementation="triton")
        assert backend.supports_decode(step.problem) is None
        step.check(backend, tolerance=1e-4)

    def test_the_kernels_own_reason_is_given(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("kernels.decode.plans.why_not", lambda *given: f"not {given[1]}")
        problem = Step(lengths=[1], dtype="bfloat16").problem
        assert backend_of("flash_decode").supports_decode(problem) == "not torch.bfloat16"

    def test_what_it_says_of_itself(self) -> None:
        problem = Step(lengths=[1], kv_lora_rank=4, rope_head_dim=2).problem
        assert backend_of("mla_absorbed").decode_choice(problem) == "mla_absorbed(torch)"
        forced = backend_of("mla_absorbed", implementation="triton")
        assert forced.decode_choice(problem) == "mla_absorbed"


class TestRotary:
    def test_neighbours_and_halves_by_hand(self) -> None:
        quarter = Rotary(torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0, 0.0]]), True)
        x = torch.tensor([[[[1.0, 2.0, 3.0, 4.0]]]])
        positions = torch.zeros(1, 1, dtype=torch.long)
        # The first pair turns by 90 degrees, (a, b) to (-b, a); the second stays.
        assert apply_rotary(x, quarter, positions).flatten().tolist() == [-2.0, 1.0, 3.0, 4.0]
        halves = quarter._replace(interleaved=False)
        assert apply_rotary(x, halves, positions).flatten().tolist() == [-3.0, 2.0, 1.0, 4.0]

    def test_what_is_beyond_the_pairs_stays(self) -> None:
        table = rotary_table(8, 4)
        assert table.rotary_dim == 4
        x = torch.randn(1, 2, 3, 6, dtype=torch.bfloat16)
        turned = apply_rotary(x, table, torch.tensor([[5, 6, 7]]))
        assert turned.dtype == torch.bfloat16
        assert torch.equal(turned[..., 4:], x[..., 4:])
        assert not torch.equal(turned[..., :4], x[..., :4])

    def test_angles(self) -> None:
        table = rotary_table(4, 4, theta=100.0)
        # theta^(-2i / 4): 1 and a tenth of a radian a position.
        assert torch.allclose(table.sin[3], torch.tensor([3.0, 0.3]).sin())


class TestAuto:
    def test_every_chain_ends_where_nothing_is_refused(self) -> None:
        for names in DECODE_CHAINS.values():
            assert set(names) <= set(BACKENDS.names())
            for step in (Step(lengths=[1]), Step(lengths=[1], kv_lora_rank=4, rope_head_dim=2)):
                taken = [backend_of(name).supports_decode(step.problem) for name in names]
                assert None in taken

    def test_detection_is_in_the_order_of_megatron(self) -> None:
        """Version 3 before 2, and either before what is slower; latents by FlashMLA first."""
        chain = DECODE_CHAINS["sm_90"]
        assert chain.index("flash_attn_3") < chain.index("flash_attn_2") < chain.index("sdpa")
        assert chain.index("flash_mla") < chain.index("mla_absorbed")

    def test_the_chain_follows_the_device(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert decode_chain_of("cpu") == DECODE_CHAINS["CPU"]
        monkeypatch.setattr("kernels.backends.auto.chain_of", lambda device: CHAINS["sm_90"])
        assert decode_chain_of("cuda") == DECODE_CHAINS["sm_90"]
        monkeypatch.setattr("kernels.backends.auto.chain_of", lambda device: CHAINS["older GPUs"])
        assert decode_chain_of("cuda") == DECODE_CHAINS["other GPUs"]

    def test_on_this_cpu(self) -> None:
        assert choose_decode(Step(lengths=[1]).problem).name == "sdpa"
        latent = Step(lengths=[1], kv_lora_rank=4, rope_head_dim=2)
        assert backend_of("auto").decode_choice(latent.problem) == "mla_absorbed(torch)"


LATENT_SIZES = {"kv_lora_rank": 512, "rope_head_dim": 64, "num_kv_heads": 1, "block_size": 64}


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("naive", {}, "attends to whole sequences, and not from a cache"),
        ("standard", LATENT_SIZES, "takes keys and values, not latents"),
        ("mla_absorbed", {}, "takes latents: use cache=latent"),
        ("mla_materialised", {}, "takes latents: use cache=latent"),
        ("sdpa_flash", {}, "takes no mask by lengths; use sdpa"),
        ("flash_decode", {"head_dim": 320}, "head_dim is at most 256, not 320"),
        ("flash_attn_2", {"device": "cpu"}, "runs on CUDA devices only"),
        ("flash_attn_2", {"dtype": "float32"}, "takes float16 and bfloat16, not float32"),
        ("flash_attn_3", {"head_dim": 88}, "rotates a head_dim that is a multiple of 16, not 88"),
        ("flash_attn_3", {"head_dim": 320}, "multiple of 8 and at most 256, not 320"),
        ("flash_attn_3", LATENT_SIZES, "takes keys and values, not latents"),
        ("flashinfer", {}, "takes a paged cache: use cache=paged"),
        ("flashinfer", {"block_size": 16, "new_tokens": 2}, "not task.new_tokens=2"),
        ("flashinfer", {"block_size": 16, "cuda_graph": True}, "plans each step on the host"),
        ("flash_mla", LATENT_SIZES | {"block_size": 32}, "use cache.block_size=64"),
        ("flash_mla", LATENT_SIZES | {"kv_lora_rank": 256}, "takes rank 512 with a rotary part"),
        ("flash_mla", {}, "takes latents: use cache=latent"),
    ],
)
def test_refusals_are_one_line(name: str, changes: dict[str, Any], words: str) -> None:
    reason = backend_of(name).supports_decode(problem_of(**changes))
    assert reason is not None
    assert words in reason
    assert "\n" not in reason


@pytest.mark.parametrize("name", BACKENDS.names())
def test_whoever_only_decodes_takes_no_training_call(name: str) -> None:
    backend = backend_of(name)
    if isinstance(backend, Attention):
        return
    problem = AttentionProblem(
        batch_size=1, num_heads=1, num_kv_heads=1, q_len=8, kv_len=8, head_dim=8,
        dtype="float32", device="cpu", causal=True, needs_grad=False,
    )  # fmt: skip
    assert "task=decode" in (backend.supports(problem) or "")
    with pytest.raises(ValueError, match=f"attention={name}: no backend that attends to whole"):
        backend.role(Attention)


def test_a_graph_takes_one_batch() -> None:
    captured = (torch.zeros(4, 2),)
    require_static(captured, (torch.ones(4, 2),))
    with pytest.raises(ValueError, match=r"captured for \(4, 2\) and given \(3, 2\); a dynamic"):
        require_static(captured, (torch.ones(3, 2),))
    with pytest.raises(ValueError, match="of 1 inputs was given 2"):
        require_static(captured, captured * 2)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("block_size", [None, 16])
@pytest.mark.parametrize(
    "name", ["standard", "sdpa", "flash_decode", "flash_attn_2", "flash_attn_3"]
)
def test_a_graph_sees_lengths_change(name: str, block_size: int | None) -> None:
    """One capture, replayed while every sequence grows, over the edges of blocks too."""
    size = 256 if block_size and name == "flash_attn_2" else block_size
    step = Step(
        lengths=[3, 15, 16, 40], num_heads=8, head_dim=64, block_size=size, dtype="bfloat16",
        device="cuda", cuda_graph=True, spare=80,
    )  # fmt: skip
    backend = backend_of(name)
    reason = backend.supports_decode(step.problem)
    if reason is not None:
        pytest.skip(reason)
    decoder = step.decoder(backend)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        decoder.begin()
        o: Tensor = decoder(1, q, k, v)
        return o

    decoder.plan()
    graphed = GraphedStep(run, *step.inputs)
    for _ in range(40):
        step.inputs = step._inputs()
        step.cache.places.reserve(1)
        expected, _ = step.expected()
        o = graphed(*step.inputs)
        torch.testing.assert_close(o.double(), expected, rtol=3e-2, atol=3e-2)
        step.cache.places.advance(1)
        step.lengths = step.cache.places.host_lengths
    assert step.cache.places.lengths.tolist() == step.lengths == [43, 55, 56, 80]


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("name", ["mla_absorbed", "mla_materialised"])
def test_a_graph_of_latents_sees_lengths_change(name: str) -> None:
    step = Step(
        lengths=[3, 63], num_heads=16, head_dim=128, block_size=64, dtype="bfloat16",
        kv_lora_rank=512, rope_head_dim=64, device="cuda", cuda_graph=True, spare=80,
    )  # fmt: skip
    decoder = step.decoder(backend_of(name))
    decoder.plan()

    def run() -> Tensor:
        decoder.begin()
        o: Tensor = decoder(1, *step.inputs)
        return o

    graphed = GraphedStep(run)
    for _ in range(4):
        step.cache.places.reserve(1)
        expected, _ = step.expected()
        error = (graphed().double() - expected).norm() / expected.norm()
        assert error < 4e-2
        step.cache.places.advance(1)
        step.lengths = step.cache.places.host_lengths


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize(
    ("name", "new_tokens", "block_size"),
    covering(
        ["sdpa", "flash_decode", "flash_attn_2", "flash_attn_3", "flashinfer"],
        [1, 4],
        [None, 64, 256],
    ),
)
def test_at_real_sizes(name: str, new_tokens: int, block_size: int | None) -> None:
    step = Step(
        lengths=[1000, 1, 0, 2047], num_heads=32, num_kv_heads=8, head_dim=128,
        new_tokens=new_tokens, block_size=block_size, dtype="bfloat16", device="cuda",
    )  # fmt: skip
    check(name, step, tolerance=3e-2)
