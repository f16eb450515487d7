"""Everything that can be chosen composes: each choice of each group, each named sweep."""

from __future__ import annotations

import json
import math

import pytest
import yaml

from harness.analysis.intervals import FEWEST_ROUNDS
from harness.cases.case import Case
from harness.cases.sweep import load_sweep
from harness.paths import CONF, SWEEPS
from harness.render.figure import FIGURES
from harness.render.table import TABLES
from harness.request.choices import REGISTRIES, choices
from harness.request.compose import Request, compose_request
from harness.request.config import GROUPS
from harness.request.plan import predicted_seconds
from harness.run import local
from harness.run.rounds.interleaving import comparison_groups

NAMES = sorted(path.stem for path in SWEEPS.glob("*.yaml"))

# The questions of the CS336 text, and the first look of the README.
EXPECTED = {
    *("benchmarking_script", "warmup_effect", "mixed_precision"),
    *("pytorch_attention", "torch_compile", "quickstart"),
}

OF_MEMORY = {"kv_memory", "context_parallel_memory"}
"""Bytes need no rounds."""


@pytest.fixture(autouse=True)
def eight_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with eight H200s, so that what is meant for GPUs composes anywhere."""
    monkeypatch.setattr(local, "probe_cuda", lambda: {"names": ["NVIDIA H200"] * 8})


def assert_positive(memory: dict[str, float]) -> None:
    assert all(math.isfinite(value) and value >= 0 for value in memory.values())
    assert sum(memory.values()) > 0


def assert_whole(case: Case) -> None:
    """A case survives its JSON, and its formulas give numbers."""
    assert Case.from_dict(json.loads(json.dumps(case.to_dict()))) == case
    memory = case.task.predicted_memory(case)
    if memory is not None:
        assert_positive(memory)
    work = case.task.work(case)
    assert work
    assert all(math.isfinite(item.flops) and item.flops >= 0 for item in work.values())
    assert max(item.flops or item.bytes or item.sent_bytes or 0 for item in work.values()) > 0
    for name in ("", "NVIDIA H200"):
        assert 0 < predicted_seconds(case, name) < math.inf
    assert case.title


def choice_points() -> list[tuple[str, str]]:
    return [(group, name) for group in GROUPS for name in choices(group)]


@pytest.mark.parametrize(("group", "name"), choice_points())
def test_every_choice_composes(group: str, name: str) -> None:
    # Of what the usual task has no use for.
    task = ["task=decode"] if group == "cache" else []
    for device in ("cpu", "cuda"):
        (case,) = compose_request([*task, f"{group}={name}", f"device={device}"]).cases
        assert case.device == device
        assert_whole(case)
        if group != "launcher" and hasattr(getattr(case, group), "name"):
            assert getattr(case, group).name == name


def test_every_file_of_a_group_is_a_choice() -> None:
    """And the other way round: a choice that no code registers is a file.

    A folder of conf/ is a group, or holds numbers of hardware, networks and published runs.
    """
    folders = {path.name for path in CONF.iterdir() if path.is_dir() and path.name[0] not in "._"}
    assert folders - {"hardware", "machine", "network", "published"} <= set(GROUPS)
    for folder in folders & set(GROUPS):
        files = {path.stem for path in (CONF / folder).glob("*.yaml")}
        assert files
        assert files == set(choices(folder)) - set(
            REGISTRIES[folder].names() if folder in REGISTRIES else ()
        )


def test_defaults_are_what_the_schema_says() -> None:
    """The values that a user does not type, by hand: the text's sizes, PyTorch's own choices."""
    (case,) = compose_request(["device=cpu"]).cases
    assert case.model is not None
    assert case.compile is not None
    assert (case.task.name, case.model.name, case.attention.name) == ("train_step", "small", "sdpa")
    assert (case.precision.name, case.parallel.name) == ("fp32", "none")
    assert case.compile.scope == "none"
    assert (case.seq_len, case.batch_size, case.seed) == (256, 4, 0)


class TestNamedSweeps:
    def test_all_are_there(self) -> None:
        assert set(NAMES) >= EXPECTED

    @pytest.mark.parametrize("device", ["cpu", "cuda"])
    @pytest.mark.parametrize("name", NAMES)
    def test_composes_at_every_scale(self, name: str, device: str) -> None:
        sweep = load_sweep(name)
        assert set(sweep.scales) >= {"full", "tiny"}
        for scale in sweep.scales:
            request = compose_request([f"sweeps={name}", f"device={device}", f"scale={scale}"])
            assert request.label == name
            assert request.scale == scale
            ids = [case.id for case in request.cases]
            assert len(ids) == len(set(ids)) > 1
            assert all(case.device == device for case in request.cases)
            for case in request.cases:
                assert_whole(case)

    @pytest.mark.parametrize("name", NAMES)
    def test_scale_follows_the_device(self, name: str) -> None:
        assert compose_request([f"sweeps={name}", "device=cpu"]).scale == "tiny"
        assert compose_request([f"sweeps={name}"]).scale == "full"

    @pytest.mark.parametrize("name", [*NAMES, None])
    def test_tables_and_figures_exist(self, name: str | None) -> None:
        sweep = compose_request([]).sweep if name is None else load_sweep(name)
        assert sweep.title
        assert sweep.about
        assert sweep.tables
        assert set(sweep.tables) <= set(TABLES.names())
        assert set(sweep.figures) <= set(FIGURES.names())

    @pytest.mark.parametrize("device", ["cpu", "cuda"])
    @pytest.mark.parametrize("name", NAMES)
    def test_what_is_compared_has_rounds_enough(self, name: str, device: str) -> None:
        """With fewer than three nothing is told; a profile has times of its own."""
        sweep = load_sweep(name)
        request = compose_request([f"sweeps={name}", f"device={device}"])
        pairs = [group for group in comparison_groups(request.cases) if len(group) > 1]
        timed = [case for group in pairs for case in group if case.profile is None]
        if timed and name not in OF_MEMORY:
            assert request.options.interleave >= FEWEST_ROUNDS
        words = {1: "", 3: "three rounds", 5: "five rounds", 8: "eight rounds"}
        assert words[sweep.interleave] in " ".join(sweep.about.lower().split())
        if sweep.interleave == 1:
            assert "in turns" not in sweep.about
        if sweep.until == "decided":
            assert sweep.budget_s is not None, "how long it takes is known beforehand"
            assert "UNCLEAR" in sweep.about

    @pytest.mark.parametrize("name", NAMES)
    def test_no_key_twice_in_a_grid(self, name: str) -> None:
        """YAML keeps the last of two equal keys without a word."""

        class Strict(yaml.SafeLoader):
            pass

        def mapping(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict[str, object]:
            # As written: a key of a merged grid (<<) may be given anew, which is what it is for.
            keys = [key.value for key, _ in node.value]
            assert len(keys) == len(set(keys)), keys
            return dict(
                zip(
                    keys,
                    [loader.construct_object(v, deep=True) for _, v in node.value],
                    strict=True,
                )
            )

        Strict.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, mapping)
        text = (SWEEPS / f"{name}.yaml").read_text(encoding="utf-8")
        assert yaml.load(text, Loader=Strict)

    @pytest.mark.parametrize("name", NAMES)
    def test_a_laptop_has_the_memory(self, name: str) -> None:
        cases = compose_request([f"sweeps={name}", "device=cpu"]).cases
        largest = max(sum((case.task.predicted_memory(case) or {}).values()) for case in cases)
        assert largest < 8 * 2**30


def full(name: str) -> Request:
    return compose_request([f"sweeps={name}", "device=cuda", "scale=full"])


class TestWhatTheTextAsksFor:
    """CS336 assignment 2; the numbers are typed from its problems."""

    def test_benchmarking_script(self) -> None:
        cases = full("benchmarking_script").cases
        assert {case.model.name for case in cases if case.model} == {
            *("small", "medium", "large", "xl", "2.7B")
        }
        modes = {case.task.mode for case in cases}
        assert modes == {"forward", "forward_backward", "train_step"}
        assert {case.batch_size for case in cases} == {4}
        assert {case.model.vocab_size for case in cases if case.model} == {10_000}

    def test_warmup_effect(self) -> None:
        steps = {case.task.warmup_steps for case in full("warmup_effect").cases}
        assert steps == {0, 1, 2, 5}

    def test_mixed_precision(self) -> None:
        names = {case.precision.name for case in full("mixed_precision").cases}
        assert {"fp32", "bf16"} <= names

    def test_pytorch_attention(self) -> None:
        cases = full("pytorch_attention").cases
        naive = [case for case in cases if case.attention.name == "naive"]
        found = {(case.task.head_dim, case.seq_len) for case in naive}
        text = {(d, s) for d in (16, 32, 64, 128) for s in (256, 1024, 4096, 8192, 16384)}
        assert found == text | {(d, s) for d in (16, 32, 64, 128) for s in (32768, 65536)}
        for case in cases:
            assert case.batch_size == 8
            assert case.task.num_heads == 1
            assert case.task.measure_steps == 100

    def test_torch_compile(self) -> None:
        cases = full("torch_compile").cases
        assert {"naive", "compiled"} <= {case.attention.name for case in cases}
        scopes = {case.compile.scope for case in cases if case.compile}
        assert {"none", "model"} <= scopes


class TestComparisonGroups:
    def test_backends_of_one_point_are_together(self) -> None:
        cases = compose_request(
            ["device=cpu", "model=tiny", "seq_len=8,16", "attention=naive,sdpa"]
        ).cases
        groups = [
            [(case.attention.name, case.seq_len) for case in group]
            for group in comparison_groups(cases[::-1])
        ]
        assert groups == [[("sdpa", 16), ("naive", 16)], [("sdpa", 8), ("naive", 8)]]
