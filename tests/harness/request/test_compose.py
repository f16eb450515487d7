"""From a command line to cases: flags, grammar, every change of a case, and rounds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from composing import compose, one_case, write_sweep
from conftest import ROOT
from omegaconf import OmegaConf

from harness.cases.case import Case, label
from harness.request.choices import choices
from harness.request.compose import compose_request
from harness.request.config_store import compose_config
from harness.request.grid import Parts
from harness.request.help import help_text
from kernels import BACKENDS


class TestFlags:
    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (["--help"], ["seq_len=", "KEY=VALUE", *BACKENDS.names(), *choices("model")]),
            (
                ["model=tiny", "seq_len=64", "--cfg", "job"],
                ["d_model: 128", "seq_len: 64", "timeout_s: 600.0"],
            ),
        ],
    )
    def test_no_torch_on_that_path(
        self, arguments: list[str], words: list[str], tmp_path: Path
    ) -> None:
        done = subprocess.run(
            [sys.executable, "-X", "importtime", "-m", "harness", *arguments],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0
        text = done.stdout.replace("seq_len:", "seq_len=") if "--help" in arguments else done.stdout
        for word in words:
            assert word in text
        imported = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines()}
        assert "hydra" in imported
        assert not imported & {"torch._C", "pandas._libs", "matplotlib"}

    def test_a_thousand_cases_without_torch(self) -> None:
        code = (
            "import sys; from harness.commands import lazy_imports; lazy_imports.install(); "
            "from harness.request.compose import compose_request; "
            "request = compose_request(['device=cpu', 'attention=naive,sdpa,flex,compiled', "
            "'precision=fp32,bf16', 'seq_len=range(1,126)']); "
            "print(len({case.id for case in request.cases}), 'torch._C' in sys.modules)"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
        )
        assert done.stdout.split() == ["1000", "False"]


class TestGrammar:
    def test_grid_in_the_order_typed(self) -> None:
        cases = compose("attention=naive,sdpa", "seq_len=8,16").cases
        assert [(case.attention.name, case.seq_len) for case in cases] == [
            ("naive", 8),
            ("naive", 16),
            ("sdpa", 8),
            ("sdpa", 16),
        ]

    def test_ranges_and_globs(self) -> None:
        cases = compose("seq_len=range(8,32,8)", "attention=glob(sdpa_*)").cases
        assert [case.seq_len for case in cases[::4]] == [8, 16, 24]
        assert {case.attention.name for case in cases} == {
            name for name in BACKENDS.names() if name.startswith("sdpa_")
        }

    def test_a_point_is_measured_once(self) -> None:
        assert len(compose("seq_len=8,16,8", "attention=naive,naive").cases) == 2

    def test_the_same_point_written_differently(self) -> None:
        """The defaults spelled out, and a choice's option at the value it has."""
        plain = one_case("model=tiny")
        assert one_case("model=tiny", "seq_len=256", "precision=fp32", "seed=0").id == plain.id
        assert one_case("model=tiny", "model.d_model=128").id == plain.id

    def test_grids_of_a_sweep_share_points(self, tmp_path: Path) -> None:
        text = "scales: {tiny: [{seq_len: [8, 16]}, {seq_len: [16, 32]}]}"
        cases = compose(f"sweeps={write_sweep(tmp_path, text)}").cases
        assert [case.seq_len for case in cases] == [8, 16, 32]

    def test_the_command_line_wins_over_the_sweep(self, tmp_path: Path) -> None:
        text = """
            scales:
              tiny:
                - {task: train_step, model: [tiny, small], seq_len: 64}
                - {task: attention, seq_len: [64, 128]}
            """
        path = write_sweep(tmp_path, text)
        request = compose(f"sweeps={path}", "model=tiny", "seq_len=8", "batch_size=2")
        assert [(case.task.name, case.seq_len, case.batch_size) for case in request.cases] == [
            ("train_step", 8, 2),
            ("attention", 8, 2),
        ]
        train_step, attention = request.cases
        assert train_step.model is not None
        assert train_step.model.name == "tiny"
        assert attention.model is None

    def test_tables_of_changed_sweeps_lie_apart(self) -> None:
        names = {
            compose(*arguments).label
            for arguments in (["sweeps=quickstart"], ["sweeps=quickstart", "seq_len=8"])
        }
        assert len(names) == 2
        assert "quickstart" in names

    def test_how_to_run_does_not_change_what_is_measured(self) -> None:
        plain = one_case("model=tiny")
        other = one_case(
            *("model=tiny", "results=elsewhere", "timeout_s=5", "isolate=true", "retry=true"),
            *("interleave=4", "launcher.vote_timeout_s=3"),
        )
        assert other.id == plain.id

    def test_how_to_run(self) -> None:
        request = compose("timeout_s=5", "isolate=true", "retry=true", "launcher.vote_timeout_s=3")
        options = request.options
        assert (options.timeout_s, options.isolate, options.retry) == (5.0, True, True)
        assert options.vote_timeout_s == 3.0
        assert options.interleave == 1


CHANGES = [
    ["task.mode=forward"],
    ["task.warmup_steps=1"],
    ["task.measure_steps=3"],
    ["model=small"],
    ["model.d_model=256"],
    ["model.d_ff=256"],
    ["model.num_layers=1"],
    ["model.num_heads=2"],
    ["model.num_kv_heads=2"],
    ["model.vocab_size=7"],
    ["model.rope_theta=5e5"],
    ["model.norm_eps=1e-6"],
    ["attention=naive"],
    ["attention=sdpa_math"],
    ["attention.kernel=math"],
    ["precision=bf16"],
    ["precision=bf16_pure"],
    ["precision=fp16"],
    ["precision=fp16", "precision.grad_scaler=false"],
    ["precision=tf32"],
    ["compile=model"],
    ["compile=block"],
    ["compile=model", "compile.mode=reduce-overhead"],
    ["parallel=ddp_torch"],
    ["parallel=ddp_torch", "parallel.dp=4"],
    ["parallel=ddp_torch", "parallel.bucket_size_mb=1"],
    ["seq_len=8"],
    ["batch_size=8"],
    ["seed=8"],
    ["task=attention"],
    ["task=attention", "task.causal=false"],
    ["task=attention", "task.head_dim=32"],
    ["task=attention", "task.num_heads=8"],
    ["task=attention", "task.num_kv_heads=4"],
]


def _compose_change(change: list[str]) -> Case:
    model = [] if "task=attention" in change or "model=small" in change else ["model=tiny"]
    return one_case(*model, *change)


class TestCase:
    @pytest.mark.parametrize("change", [[], *CHANGES], ids=" ".join)
    def test_round_trip_through_json(self, change: list[str]) -> None:
        case = _compose_change(change)
        again = Case.from_dict(json.loads(json.dumps(case.to_dict())))
        assert again == case
        assert type(again.attention) is type(case.attention)
        assert again.id == case.id

    def test_every_field_is_in_the_id(self) -> None:
        ids = [_compose_change(change).id for change in [[], *CHANGES]]
        assert len(set(ids)) == len(ids)

    def test_the_id_does_not_change(self) -> None:
        """Over versions of this code: records that were measured keep their case.

        Change the digest only together with the meaning of a case.
        """
        expected = "train_step-train_step-tiny-naive-fp32-b4-s256-cpu-"
        case = one_case("model=tiny", "attention=naive")
        assert case.id.startswith(expected)
        code = (
            "from harness.request.compose import compose_request; "
            "print(compose_request(['attention=naive', 'model=tiny', 'device=cpu']).cases[0].id)"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == case.id

    @pytest.mark.parametrize(
        ("change", "expected"),
        [
            ([], "sdpa"),
            (["attention=sdpa_flash"], "sdpa_flash"),
            (["attention.kernel=math"], "sdpa(kernel=math)"),
            (["attention=sdpa_flash", "attention.kernel=math"], "sdpa_flash(kernel=math)"),
            (["attention=sdpa_flash", "attention.kernel=flash"], "sdpa_flash"),
        ],
    )
    def test_label_of_changed_options(self, change: list[str], expected: str) -> None:
        assert label(one_case("model=tiny", *change).attention) == expected

    def test_label_of_a_strategy(self) -> None:
        plain = one_case("model=tiny", "parallel=ddp_torch")
        assert label(plain.parallel) == "ddp_torch"
        changed = one_case("model=tiny", "parallel=ddp_torch", "parallel.bucket_size_mb=1")
        assert label(changed.parallel) == "ddp_torch(bucket_size_mb=1)"

    def test_a_name_that_a_file_can_have(self) -> None:
        case = one_case("model=tiny", "attention.kernel=math", "precision=bf16", "compile=block")
        slug, _, digest = case.id.rpartition("-")
        assert slug == (
            "train_step-train_step-tiny-sdpa_kernel_math_-bf16-b4-s256-compile_block-cpu"
        )
        assert len(digest) == 10
        int(digest, 16)

    def test_values_that_no_code_knows(self) -> None:
        """A record of a backend that is gone is refused by name."""
        values: dict[str, Any] = one_case("model=tiny").to_dict()
        values["attention"]["name"] = "gone"
        with pytest.raises(ValueError, match="attention=gone: no such choice"):
            Case.from_dict(values)


DECIDED_IN_5, ROUNDS_IN_1 = (5, True), (1, False)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["attention=naive,sdpa"], DECIDED_IN_5),
        (["parallel=ddp_naive,ddp_flat"], DECIDED_IN_5),
        (["attention=naive"], ROUNDS_IN_1),
        (["attention=naive,sdpa", "until=rounds"], ROUNDS_IN_1),
        (["attention=naive,sdpa", "interleave=3"], (3, False)),
        (["attention=naive,sdpa", "interleave=3", "until=decided"], (3, True)),
        (["attention=naive,sdpa", "task.measure_steps=4"], ROUNDS_IN_1),
        (["attention=naive,sdpa", "task.measure_steps=4", "until=decided"], (4, True)),
        (["seq_len=8,16"], ROUNDS_IN_1),
        (["sweeps=quickstart"], DECIDED_IN_5),
        (["sweeps=quickstart", "until=rounds"], (5, False)),
        (["sweeps=quickstart", "until=rounds", "interleave=1"], ROUNDS_IN_1),
        (["sweeps=benchmarking_script"], (3, False)),
        (["sweeps=benchmarking_script", "until=decided"], (3, True)),
    ],
)
def test_what_compares_is_measured_until_decided(
    arguments: list[str], expected: tuple[int, bool]
) -> None:
    options = compose_request(["device=cpu", *arguments]).options
    assert (options.interleave, options.until_decided) == expected


def test_how_rounds_are_added() -> None:
    options = compose_request(["device=cpu", "budget_s=12.5", "max_rounds=9"]).options
    assert (options.budget_s, options.max_rounds) == (12.5, 9)
    assert compose_request(["device=cpu"]).options.budget_s is None
    assert compose_request(["device=cpu", "sweeps=quickstart"]).options.budget_s == 30


@pytest.mark.parametrize(
    ("arguments", "rounds"), [([], 5), (["interleave=6"], 6), (["task.measure_steps=3"], 3)]
)
def test_a_sweeps_rounds_are_its_own_or_the_users_and_never_empty(
    arguments: list[str], rounds: int
) -> None:
    request = compose_request(
        ["sweeps=short_sequences", "scale=tiny", "device=cpu", "seq_len=64", *arguments]
    )
    assert request.options.interleave == rounds


@pytest.mark.parametrize(
    ("group", "name"),
    [
        ("task", "attention"),
        ("attention", "flash_triton"),
        ("parallel", "fsdp"),
        ("model", "small"),
    ],
)
def test_a_choice_is_made_as_hydra_would(group: str, name: str) -> None:
    """Hydra is asked for those in files alone, since it takes a tenth of a second for each."""
    ours = Parts().choice(group, {group: name})
    theirs = OmegaConf.to_object(compose_config([f"{group}={name}"])[group])
    assert type(ours) is type(theirs)
    assert ours == theirs


def test_help_is_as_hydra_would_write_it() -> None:
    """Hydra writes it itself where one of its own keys is set."""
    keys = ["model=tiny", "task=attention"]
    done = subprocess.run(
        [sys.executable, "-m", "harness", "--help", *keys, "hydra.verbose=false"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"{help_text(keys)}\n"
