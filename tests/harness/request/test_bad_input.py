"""Command lines that are refused, each in one line that names the key."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from composing import compose, write_sweep
from conftest import Command

from harness.commands.attnbench import run
from harness.request import session
from harness.request.compose import Request, compose_request


@pytest.fixture
def never_runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A command that is not refused fails the test instead of measuring."""

    def run_request(request: Request) -> int:
        raise AssertionError(f"{len(request.cases)} cases would run")

    monkeypatch.setattr(session, "run_request", run_request)
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


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
    "no time at all": (["timeout_s=nan"], ["timeout_s=nan:", "a finite number"]),
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
    "folders of Hydra": (["hydra.searchpath=[x]"], ["hydra.searchpath:", "--config-dir DIR"]),
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
