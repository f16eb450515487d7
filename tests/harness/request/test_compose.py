"""From a command line to cases: accepted keys, refused keys, and the messages."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Command
from omegaconf import OmegaConf

from harness.cases.case import Case, label
from harness.commands.attnbench import run
from harness.request import session
from harness.request.choices import choices
from harness.request.compose import Request, compose_request
from harness.request.config_store import compose_config
from harness.request.grid import Parts
from harness.request.help import help_text
from kernels import BACKENDS


def compose(*arguments: str) -> Request:
    return compose_request(["device=cpu", *arguments])


def one_case(*arguments: str) -> Case:
    (case,) = compose(*arguments).cases
    return case


@pytest.fixture
def never_runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A command that is not refused fails the test instead of measuring."""

    def run_request(request: Request) -> int:
        raise AssertionError(f"{len(request.cases)} cases would run")

    monkeypatch.setattr(session, "run_request", run_request)
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def write_sweep(folder: Path, text: str) -> str:
    path = folder / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


BAD: dict[str, tuple[list[str], list[str]]] = {
    # What is wrong: the command, and words that its one line must have.
    "unknown backend": (["attention=naiv"], ["attention=naiv:", "did you mean naive?", "sdpa"]),
    "unknown model": (["model=smal"], ["model=smal:", "did you mean small?", "tiny"]),
    "unknown task": (["task=trainstep"], ["task=trainstep:", "train_step"]),
    "unknown precision": (["precision=fp64"], ["precision=fp64:", "bf16"]),
    "unknown compile": (["compile=blocks"], ["compile=blocks:", "did you mean block?"]),
    "unknown strategy": (["parallel=dpp_torch"], ["parallel=dpp_torch:", "ddp_torch"]),
    "unknown launcher": (["launcher=lokal"], ["launcher=lokal:", "did you mean local?"]),
    "unknown among known": (["attention=naive,sdpaa"], ["attention=sdpaa:", "did you mean sdpa"]),
    "mistyped group": (["atention=naive"], ["atention: no such key", "did you mean attention?"]),
    "mistyped value": (["seqlen=128"], ["seqlen: no such key", "did you mean seq_len?"]),
    "mistyped key of the model": (
        ["model.d_modle=64"],
        ["model.d_modle: no such key", "did you mean model.d_model?"],
    ),
    "mistyped key of the task": (
        ["task.warmup_step=1"],
        ["task.warmup_step: no such key", "did you mean task.warmup_steps?"],
    ),
    "mistyped key of a backend": (
        ["attention=sdpa", "attention.kernal=math"],
        ["attention.kernal: no such key", "did you mean attention.kernel?"],
    ),
    "key of another backend": (["attention=naive", "attention.kernel=math"], ["attention.kernel:"]),
    "key far from any": (["zzz=1"], ["zzz: no such key", "seq_len"]),
    "wrong type of a length": (["seq_len=long"], ["seq_len=long:", "Integer"]),
    "a fraction for a count": (["batch_size=1.5"], ["batch_size=1.5:", "Integer"]),
    "wrong type in a group": (["model.d_model=wide"], ["model.d_model=wide:", "Integer"]),
    "wrong type of how to run": (["timeout_s=soon"], ["timeout_s=soon:", "Float"]),
    "no time at all": (["timeout_s=nan"], ["timeout_s=nan:", "positive"]),
    "wrong type of a flag": (["plan=perhaps"], ["plan=perhaps:", "bool"]),
    "wrong type for the launcher": (
        ["launcher.vote_timeout_s=soon"],
        ["launcher.vote_timeout_s=soon:", "Float"],
    ),
    "heads that do not divide": (
        ["model.num_heads=7"],
        ["model.num_heads=7:", "must divide model.d_model=768"],
    ),
    "KV heads that do not divide": (
        ["model.num_kv_heads=5"],
        ["model.num_kv_heads=5:", "must divide model.num_heads=12"],
    ),
    "KV heads of the task": (
        ["task=attention", "task.num_kv_heads=3"],
        ["task.num_kv_heads=3:", "must divide task.num_heads=16"],
    ),
    "head_dim that is odd": (["model.num_heads=256"], ["model.num_heads=256:", "even"]),
    "negative steps": (["task.warmup_steps=-1"], ["task.warmup_steps=-1:", "at least 0"]),
    "no steps": (["task.measure_steps=0"], ["task.measure_steps=0:", "at least 1"]),
    "negative length": (["seq_len=-128"], ["seq_len=-128:", "at least 1"]),
    "no batch": (["batch_size=0"], ["batch_size=0:", "at least 1"]),
    "negative layers": (["model.num_layers=-2"], ["model.num_layers=-2:", "at least 1"]),
    "negative seed": (["seed=-1"], ["seed=-1:", "at least 0"]),
    "negative time": (["timeout_s=-5"], ["timeout_s=-5:", "positive"]),
    "neither fresh nor not": (["fresh_rounds=often"], ["fresh_rounds=often:", "auto, true, false"]),
    "no such end": (["until=bored"], ["until=bored:", "auto, rounds, decided"]),
    "results nowhere": (["results="], ["results=: must name a folder"]),
    "mistyped task": (["task=atention"], ["task=atention:", "did you mean attention?"]),
    "mistyped sweep": (["sweeps=quickstrt"], ["sweeps=quickstrt:", "did you mean quickstart?"]),
    "time below none": (["budget_s=-1"], ["budget_s=-1: must not be negative"]),
    "no most rounds": (["max_rounds=0"], ["max_rounds=0:", "at least 1"]),
    "no rounds": (["interleave=0"], ["interleave=0:", "at least 1"]),
    "rounds without passes": (
        ["interleave=9", "task.measure_steps=5"],
        ["interleave=9:", "task.measure_steps=5; must be at most that"],
    ),
    "negative ranks": (["parallel=ddp_torch", "parallel.dp=-1"], ["parallel.dp=-1:", "at least 1"]),
    "ranks without a strategy": (["parallel.dp=2"], ["parallel.dp=2:", "ddp_torch"]),
    "no vote": (["launcher.vote_timeout_s=0"], ["launcher.vote_timeout_s=0", "positive"]),
    "unknown mode": (["task.mode=backwards"], ["task.mode=backwards:", "forward_backward"]),
    "unknown kernel": (["attention.kernel=fast"], ["attention.kernel=fast:", "cudnn"]),
    "unknown compile mode": (["compile=model", "compile.mode=fast"], ["compile.mode=fast:"]),
    "compile mode of nothing": (["compile.mode=max-autotune"], ["compile.mode=max-autotune:"]),
    "unknown dtype": (["precision.parameters=fp8"], ["precision.parameters=fp8:", "bfloat16"]),
    "scaler without float16": (["precision.grad_scaler=true"], ["precision.grad_scaler=true:"]),
    "unknown device": (["device=tpu"], ["device=tpu:", "cpu", "cuda"]),
    "no GPU": (["device=cuda"], ["device=cuda:", "use device=cpu"]),
    "unknown scale": (["sweeps=quickstart", "scale=huge"], ["scale=huge:", "tiny"]),
    "unknown sweep": (["sweeps=quikstart"], ["sweeps=quikstart:", "quickstart"]),
    "missing sweep file": (["sweeps=nowhere/my.yaml"], ["sweeps=nowhere/my.yaml:"]),
    "two sweeps": (["sweeps=quickstart,torch_compile"], ["sweeps:", "one sweep"]),
    "key of no use": (["task=attention", "model.d_model=64"], ["model.d_model:", "leave it out"]),
    "choice of no use": (["task=attention", "compile=model"], ["compile:", "leave it out"]),
    "ranks for one-device attention": (
        ["task=attention", "parallel=ddp_torch"],
        ["parallel.dp=2:", "parallel.cp=", "task=train_step"],
    ),
    "ranks for attention on one device": (
        ["attention=naive", "parallel.cp=2"],
        ["parallel.cp=2:", "attention=naive", "zigzag_llama3"],
    ),
    "no context-parallel rank": (["parallel.cp=0"], ["parallel.cp=0:", "at least 1"]),
    "keys apart from queries, split": (
        ["task=attention", "attention=zigzag", "parallel.cp=2", "task.kv_len=512"],
        ["task.kv_len=512:", "parallel.cp=2"],
    ),
    "unknown kernel of a ring": (
        ["attention=ring", "attention.kernel=flash"],
        ["attention.kernel=flash:", "flash_triton"],
    ),
    "unknown transport": (
        ["attention=ring", "attention.transport=nccl"],
        ["attention.transport=nccl:", "send_recv, symmetric"],
    ),
    "given twice": (["seq_len=128", "seq_len=256"], ["seq_len: given twice"]),
    "several results folders": (["results=a,b"], ["results:", "one value"]),
    "added": (["+seq_len=128"], ["+seq_len=128:", "KEY=VALUE"]),
    "removed": (["~model"], ["~model:", "KEY=VALUE"]),
    "no value": (["seq_len"], ["seq_len:", "KEY=VALUE"]),
    "not the grammar": (["seq_len=[1,"], ["seq_len=[1,:", "KEY=VALUE"]),
    "an interval": (["seq_len=interval(1,9)"], ["seq_len:", "range("]),
    "a glob of values": (["seq_len=glob(*)"], ["seq_len:", "glob("]),
    "a glob of nothing": (
        ["attention=glob(zzz*)"],
        ["attention: the glob matches none of", "naive"],
    ),
    "settings of Hydra": (["hydra.run.dir=here"], ["hydra.run.dir:"]),
    "a sweep's keys mistyped": (
        ["sweeps=quickstart", "task.warmup=1"],
        ["task.warmup: no such key", "did you mean task.warmup_steps?"],
    ),
}


class TestBadInput:
    @pytest.mark.usefixtures("never_runs")
    @pytest.mark.parametrize("name", BAD)
    def test_one_line_that_names_the_key(
        self,
        name: str,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        from harness.run import local

        monkeypatch.setattr(local, "probe_cuda", lambda: {"names": [], "reason": "no GPU here"})
        arguments, words = BAD[name]
        results = tmp_path / "results"
        if not any(item.startswith("results=") for item in arguments):
            arguments = [f"results={results}", *arguments]
        assert run(arguments) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.count("\n") == 1
        assert captured.err.startswith("attnbench: ")
        for word in words:
            assert word in captured.err
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("scales: [", ["not valid YAML"]),
            ("just words", ["scales"]),
            ("title: no scales", ["scales"]),
            ("scales: {tiny: {seq_len: 1}}", ["scales.tiny", "list"]),
            ("scales: {tiny: [seq_len]}", ["scales.tiny", "mapping"]),
            ("tabels: [summary]\nscales: {tiny: [{}]}", ["unknown key tabels", "tables"]),
            ("scales: {tiny: []}", ["no case"]),
            ("scales: {tiny: [{seq_len: []}]}", ["no case"]),
            ("scales: {tiny: [{seqlen: 8}]}", ["seqlen: no such key", "seq_len"]),
            ("scales: {tiny: [{model: smal}]}", ["model=smal", "did you mean small?"]),
            ("scales: {tiny: [{seq_len: [8, many]}]}", ["seq_len=many"]),
            ("scales: {tiny: [{timeout_s: 8}]}", ["timeout_s", "command line"]),
            ("scales: {tiny: [{model.num_heads: 7}]}", ["model.num_heads=7"]),
            ("tables: [sumary]\nscales: {tiny: [{}]}", ["sumary"]),
            ("figures: [step_tme]\nscales: {tiny: [{}]}", ["step_tme"]),
        ],
    )
    @pytest.mark.usefixtures("never_runs")
    def test_broken_sweep_file(
        self, text: str, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = write_sweep(tmp_path, text)
        results = tmp_path / "results"
        assert run([f"sweeps={path}", "device=cpu", f"results={results}"]) == 2
        captured = capsys.readouterr()
        assert captured.err.count("\n") == 1
        for word in words:
            assert word in captured.err
        assert not results.exists()

    def test_the_real_command_says_it_in_one_line(self, tmp_path: Path, command: Command) -> None:
        done = command(f"results={tmp_path / 'results'}", "seq_len=0", "device=cpu")
        assert done.returncode == 2
        assert done.stderr == "attnbench: seq_len=0: must be at least 1\n"
        assert done.stdout == ""
        assert list(tmp_path.iterdir()) == []

    def test_a_bad_point_stops_a_good_grid(self) -> None:
        with pytest.raises(ValueError, match=r"^model\.num_heads=7"):
            compose("model=tiny", "seq_len=8,16", "model.num_heads=4,7")

    def test_more_gpus_than_there_are(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from harness.run import local

        monkeypatch.setattr(local, "probe_cuda", lambda: {"names": ["NVIDIA H200"]})
        with pytest.raises(ValueError, match=r"parallel\.dp=2: .* this host has 1"):
            compose_request(["device=cuda", "parallel=ddp_torch"])


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
