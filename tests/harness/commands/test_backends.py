"""The list of backends, and attention=auto, which takes the first of a chain."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Command

from harness.cases.format import ABSENT
from harness.commands import backends as listing
from harness.commands.backends import features_of
from kernels import BACKENDS, Attention, AttentionProblem, AttentionSpec, DenseAttention, Packing
from kernels.backends import auto
from kernels.backends.auto import CHAINS, choose
from parallel.context.attention import SequenceParallelAttention

PROBLEM = AttentionProblem(
    batch_size=2,
    num_heads=4,
    num_kv_heads=2,
    q_len=16,
    kv_len=16,
    head_dim=8,
    dtype="float32",
    device="cpu",
    causal=True,
    needs_grad=True,
)


@dataclass(kw_only=True, slots=True)
class Picky(DenseAttention):
    """Refuses what its test says."""

    refuses: Callable[[AttentionProblem], bool]

    def supports(self, problem: AttentionProblem) -> str | None:
        return "not this one" if self.refuses(problem) else None

    def version(self) -> str | None:
        return None


def picky(refuses: Callable[[AttentionProblem], bool]) -> listing.Features:
    return features_of(Picky(name="picky", refuses=refuses), "cpu")


class TestFeatures:
    def test_of_one_that_takes_everything(self) -> None:
        found = picky(lambda problem: False)
        assert found == listing.Features(
            name="picky",
            version=ABSENT,
            usable="yes",
            reason=None,
            grouped="yes",
            packed="loop",
            lengths="any",
            ring="yes",
            head_dims="any",
        )

    def test_of_one_that_takes_nothing(self) -> None:
        found = picky(lambda problem: True)
        assert found.usable == "no"
        assert found.reason == "not this one"
        assert {found.grouped, found.packed, found.lengths, found.ring, found.head_dims} == {ABSENT}

    def test_without_gradients(self) -> None:
        found = picky(lambda problem: problem.needs_grad)
        assert (found.usable, found.reason) == ("forward", "not this one")

    def test_in_one_dtype_alone(self) -> None:
        found = picky(lambda problem: problem.dtype != "float32")
        assert (found.usable, found.reason) == ("yes", None)

    def test_each_refusal_has_its_column(self) -> None:
        plain = picky(lambda problem: False)
        grouped = picky(lambda problem: problem.num_kv_heads != problem.num_heads)
        assert grouped == replace(plain, grouped="no")
        packed = picky(lambda problem: problem.packed)
        assert packed == replace(plain, packed="no")
        fewer = picky(lambda problem: problem.causal and problem.kv_len < problem.q_len)
        assert fewer == replace(plain, lengths="S_k>S_q")
        other = picky(lambda problem: problem.kv_len != problem.q_len)
        assert other == replace(plain, lengths="no")

    def test_masks_are_those_that_it_takes_and_supports(self) -> None:
        class Masked(Picky):
            takes = frozenset(("window", "softcap", "sinks"))

        found = features_of(Masked(name="m", refuses=lambda problem: problem.window == 100), "cpu")
        assert found.masks == "softcap, sinks"
        assert picky(lambda problem: False).masks == "no"

    def test_narrower_values_are_asked_at_the_widths_of_latent_attention(self) -> None:
        class Narrow(Picky):
            takes = frozenset(("value_dim",))

        asked = Narrow(name="n", refuses=lambda problem: False)
        assert features_of(asked, "cpu").narrow_values
        refused = Narrow(name="n", refuses=lambda problem: problem.v_dim == 128)
        assert not features_of(refused, "cpu").narrow_values
        assert not picky(lambda problem: False).narrow_values

    @pytest.mark.parametrize(
        ("takes", "words"),
        [
            (lambda dim: dim <= 256, "up to 256"),
            (lambda dim: dim % 8 == 0, "8+ by 8"),
            (lambda dim: dim % 8 == 0 and dim <= 256, "8-256 by 8"),
            (lambda dim: dim in (64, 128, 256), "64, 128, 256"),
            (lambda dim: dim == 64, "64"),
            (lambda dim: dim % 8 == 0 and 16 <= dim <= 128, "16-128 by 8"),
            (lambda dim: dim >= 16 and dim % 8 == 0, "16+ by 8"),
        ],
    )
    def test_head_dims(self, takes: Callable[[int], bool], words: str) -> None:
        assert picky(lambda problem: not takes(problem.head_dim)).head_dims == words

    @pytest.mark.parametrize("name", BACKENDS.names())
    def test_of_every_backend_here(self, name: str) -> None:
        entry = BACKENDS[name]
        backend = entry.target(name=name, **entry.preset)
        found = features_of(backend, "cpu")
        assert found.usable in ("yes", "forward", "decode", "no")
        assert found.usable != "no" or found.caches == "no"
        assert (found.reason is None) == (found.usable == "yes")
        if found.usable in ("yes", "forward"):
            assert found.ring == ("yes" if backend.role(Attention).gives_lse else "no")
            assert ABSENT not in (found.grouped, found.packed, found.lengths, found.head_dims)

    def test_a_packed_call_of_its_own_is_native(self) -> None:
        @dataclass(kw_only=True, slots=True)
        class Native(Attention):
            """Takes any batch in one call."""

        assert features_of(Native(name="native"), "cpu").packed == "native"


class TestCommand:
    def test_lists_every_backend(self, command: Command) -> None:
        done = command("backends", "device=cpu", environment={"COLUMNS": "80"})
        assert (done.returncode, done.stderr) == (0, "")
        above, _, below = done.stdout.partition("From a cache")
        listed = [line for line in above.splitlines()[4:] if line]
        splitting = {
            entry.name for entry in BACKENDS if issubclass(entry.target, SequenceParallelAttention)
        }
        names = [line.split()[0] for line in listed]
        assert names == [name for name in BACKENDS.names() if name not in splitting]
        assert max(map(len, listed)) <= 80
        assert "…" not in done.stdout
        usable = {line.split()[0]: line for line in listed}
        assert " decode " in usable["standard"]
        assert " decode " in usable["mla_absorbed"]
        assert re.search("\n  standard +contiguous, paged\n", below)
        assert re.search("\n  naive +window, prefix_len, softcap, sinks\n", below)
        assert re.search("\n  sdpa_flash +sinks\n", below)
        schemes = sorted(splitting - {"context_parallel_torch", "ulysses", "documents"})
        assert f"ring column says yes: {', '.join(schemes)}.\n" in below
        assert "Over parallel.cp ranks, with any usable attention.kernel=: ulysses.\n" in below
        assert re.search(r"packed batches alone, with any usable [^:]+: documents\.\n", below)
        assert "Not over parallel.cp ranks here: context_parallel_torch (PyTorch's" in below
        assert re.search("  flash_attn_4 +runs on CUDA devices only", done.stdout)
        assert "attention=auto would choose sdpa here." in done.stdout

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["device=tpu"], "device=tpu: must be one of auto, cpu, cuda"),
            (["device=cuda"], "device=cuda: torch sees no CUDA device; use device=cpu"),
            (["--cfg"], "backends --cfg: no such key; usage: attnbench backends [device="),
            (["flex"], "backends flex: no such key"),
        ],
    )
    def test_mistakes(
        self,
        arguments: list[str],
        message: str,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        assert listing.main(arguments) == 2
        output = capsys.readouterr()
        assert output.out == ""
        assert output.err.startswith(f"attnbench: {message}")
        assert output.err.count("\n") == 1

    def test_help(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert listing.main(["--help"]) == 0
        assert capsys.readouterr().out.startswith("Usage: attnbench backends [device=")


@pytest.fixture
def _forget_choices() -> Iterator[None]:
    choose.cache_clear()
    yield
    choose.cache_clear()


@pytest.mark.usefixtures("_forget_choices")
class TestAuto:
    @pytest.mark.parametrize("device", CHAINS)
    def test_chains_name_backends_and_end_in_one_that_takes_everything(self, device: str) -> None:
        names = CHAINS[device]
        assert set(names) <= set(BACKENDS.names()) - {"auto"}
        assert len(set(names)) == len(names)
        assert names[-1] == "flash_torch"

    @pytest.mark.parametrize(
        ("capability", "chain"),
        [((9, 0), "sm_90"), ((10, 0), "newer GPUs"), ((8, 0), "older GPUs"), (None, "older GPUs")],
    )
    def test_the_chain_is_the_gpus(
        self,
        capability: tuple[int, int] | None,
        chain: str,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        assert auto.chain_of("cuda") == CHAINS[chain]
        assert auto.chain_of("cpu") == CHAINS["CPU"]

    def test_takes_the_first_that_supports_the_problem(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (9, 0))
        able = {"flash_attn_3", "sdpa_cudnn", "sdpa", "flash_torch"}
        for entry in BACKENDS:
            monkeypatch.setattr(
                entry.target, "supports", lambda self, problem: None if self.name in able else "no"
            )
        backend = BACKENDS["auto"].target(name="auto")
        problem = replace(PROBLEM, device="cuda")
        for name in CHAINS["sm_90"]:
            if name in able:
                choose.cache_clear()
                assert backend.choice(problem) == name
                able.remove(name)
        assert not able, "the chain has all of them"

    @pytest.mark.parametrize(
        ("changes", "name"),
        [
            ({}, "flash_triton"),
            ({"value_dim": 8}, "sdpa_cudnn"),
            ({"value_dim": 8, "needs_grad": False}, "flash_triton"),
            ({"head_dim": 192, "value_dim": 128, "dtype": "bfloat16"}, "flash_triton"),
            ({"head_dim": 192, "value_dim": 128, "dtype": "float32"}, "sdpa_cudnn"),
            ({"head_dim": 256, "value_dim": 128, "dtype": "bfloat16"}, "sdpa_cudnn"),
        ],
    )
    def test_gradients_of_most_narrower_values_are_cudnns_on_hopper(
        self, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], name: str
    ) -> None:
        monkeypatch.setattr(auto, "chain_of", lambda device: CHAINS["sm_90"])
        able = {"flash_triton", "sdpa_cudnn", "sdpa", "flash_torch"}
        for entry in BACKENDS:
            monkeypatch.setattr(
                entry.target, "supports", lambda self, problem: None if self.name in able else "no"
            )
        choose.cache_clear()
        assert choose(replace(PROBLEM, device="cuda", **changes)).name == name
        choose.cache_clear()

    @pytest.mark.parametrize(
        ("changes", "with_lse", "name"),
        [
            ({}, False, "sdpa"),
            ({}, True, "sdpa_flash"),
            ({"packed": True}, False, "naive"),
            ({"kv_len": 30}, False, "naive"),
            ({"kv_len": 8}, False, "flash_torch"),
            ({"window": 4}, False, "naive"),
            ({"window": 4}, True, "naive"),
            ({"softcap": 9.0}, False, "naive"),
            ({"sinks": True}, False, "sdpa_flash"),
            ({"window": 4, "causal": False, "kv_len": 8}, False, "flash_torch"),
            ({"shift": -4}, True, "flash_torch"),
        ],
    )
    def test_on_a_cpu(self, changes: dict[str, Any], with_lse: bool, name: str) -> None:
        assert choose(replace(PROBLEM, **changes), with_lse=with_lse).name == name

    @pytest.mark.parametrize(
        ("capability", "changes", "name"),
        [
            ((9, 0), {"window": 4}, "flash_attn_4"),
            ((9, 0), {"window": 4, "softcap": 9.0, "sinks": True}, "flash_attn_4"),
            ((9, 0), {"prefix_len": 4}, "flex"),
            ((10, 0), {"softcap": 9.0}, "flash_attn_4"),
            ((8, 0), {"window": 4, "softcap": 9.0}, "flash_attn_2"),
            ((8, 0), {"prefix_len": 4}, "flex"),
        ],
    )
    def test_passes_over_backends_that_refuse_a_mask(
        self,
        capability: tuple[int, int],
        changes: dict[str, Any],
        name: str,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """With all that a chain names installed, the first that takes the mask is chosen."""
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: capability)
        ours = BACKENDS["flash_triton"].target
        for entry in BACKENDS:
            if entry.target is not ours:
                monkeypatch.setattr(entry.target, "supports", lambda self, problem: None)
        monkeypatch.setattr(ours, "why_unsupported", lambda self, problem: "no")
        assert choose(replace(PROBLEM, device="cuda", **changes)).name == name

    def test_poses_the_problem_that_its_tensors_are(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[tuple[AttentionProblem, bool]] = []

        def note(problem: AttentionProblem, *, with_lse: bool = False) -> Attention:
            asked.append((problem, with_lse))
            return choose(problem, with_lse=with_lse)

        monkeypatch.setattr("kernels.backends.auto.choose", note)
        backend = BACKENDS["auto"].target(name="auto")
        q, k = torch.randn(2, 4, 16, 8), torch.randn(2, 2, 16, 8)
        backend.attend(q, k, k, AttentionSpec(causal=True, scale=0.3))
        backend.attend(q.clone().requires_grad_(), k, k, AttentionSpec(causal=True, scale=0.3))
        backend.forward(q, k, k, AttentionSpec(causal=True, scale=0.3))
        plain = replace(PROBLEM, needs_grad=False)
        assert asked == [(plain, False), (PROBLEM, False), (PROBLEM, True)]
        asked.clear()
        cu = torch.tensor([0, 3, 16], dtype=torch.int32)
        packing = Packing(cu_seqlens_q=cu, cu_seqlens_k=cu, max_q_len=13, max_kv_len=13)
        tokens = [x[0].transpose(0, 1) for x in (q, k, k)]
        backend.attend(*tokens, AttentionSpec(causal=True, scale=0.3, packing=packing))
        packed = replace(plain, packed=True, q_len=13, kv_len=13)
        assert asked == [(packed, False)]

    def test_compiles_without_a_graph_break(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Looking for libraries, as supports does, is nothing that Dynamo can trace."""

        def supports(self: Attention, problem: AttentionProblem) -> None:
            importlib.import_module("json")

        monkeypatch.setattr(BACKENDS["sdpa"].target, "supports", supports)
        backend = BACKENDS["auto"].target(name="auto")

        def call(q: torch.Tensor) -> torch.Tensor:
            return backend.attend(q, q, q, AttentionSpec(causal=True, scale=0.3))

        q = torch.randn(2, 4, 16, 8, requires_grad=True)
        compiled = torch.compile(call, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(q), call(q))

    def test_the_record_and_the_cases_table_say_what_was_chosen(
        self, command: Command, tmp_path: Path
    ) -> None:
        done = command(
            *("task=attention", "attention=auto,naive", "seq_len=16", "device=cpu"),
            *("task.warmup_steps=0", "task.measure_steps=1", f"results={tmp_path}"),
        )
        assert done.returncode == 0, done.stderr
        records = [json.loads(path.read_text()) for path in (tmp_path / "records").glob("*.json")]
        notes = {record["case"]["attention"]["name"]: record["notes"] for record in records}
        assert notes["auto"]["attention_choice"] == "sdpa"
        assert "attention_choice" not in notes["naive"]
        (table,) = tmp_path.glob("sweeps/*/tables/cases.csv")
        assert "sdpa" in table.read_text()


def test_help_states_the_chains(command: Command) -> None:
    done = command("--help")
    assert "attention=auto takes the first that runs:\n  sm_90      flash_attn_4, " in done.stdout
    assert "attnbench backends" in done.stdout
