"""Configuration that lies outside the project: models, hardware, launchers and sweeps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from harness.cases import hardware
from harness.cases.sweep import load_sweep
from harness.commands.flags import without_own_folders
from harness.paths import BESIDE, CONF, CONFIG_VARIABLE, config_files
from harness.request import grid
from harness.request.choices import choices
from harness.request.compose import compose_request

MODEL = (CONF / "model" / "tiny.yaml").read_text(encoding="utf-8")
SWEEP = """\
scales: {tiny: [{task: attention, attention: naive, task.num_heads: 2, seq_len: [128, 256]}]}
"""


@pytest.fixture(autouse=True)
def _nothing_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """What is composed once for a process is composed anew for each test."""
    monkeypatch.setenv(CONFIG_VARIABLE, "")
    monkeypatch.chdir(tmp_path)
    for kept in (grid._group_node, hardware._by_device_name):
        kept.cache_clear()
    yield
    for kept in (grid._group_node, hardware._by_device_name):
        kept.cache_clear()


def folder_of(path: Path, name: str = "mine") -> Path:
    """A folder with a model, a launcher, a device's hardware and a sweep of one's own."""
    for group in ("model", "launcher", "hardware", "sweeps"):
        (path / group).mkdir(parents=True)
    model = MODEL.replace("name: tiny", f"name: {name}").replace("num_layers: 4", "num_layers: 3")
    (path / "model" / f"{name}.yaml").write_text(model)
    launcher = "defaults: [slurm, _self_]\npartition: ours\n"
    (path / "launcher" / f"{name}_cluster.yaml").write_text(launcher)
    known = yaml.safe_load((CONF / "hardware" / "l40s.yaml").read_text(encoding="utf-8"))
    own = yaml.safe_dump({**known, "match": [f"{name} GPU"]})
    (path / "hardware" / f"{name}_gpu.yaml").write_text(own)
    (path / "sweeps" / f"{name}_sweep.yaml").write_text(SWEEP)
    return path


def check_all_of(name: str) -> None:
    (case,) = compose_request([f"model={name}", "device=cpu"]).cases
    assert (case.model.name, case.model.num_layers) == (name, 3)
    request = compose_request([f"sweeps={name}_sweep", "device=cpu"])
    assert [case.seq_len for case in request.cases] == [128, 256]
    launcher = compose_request([f"launcher={name}_cluster", "device=cuda"]).launcher
    assert getattr(launcher, "partition", None) == "ours"
    assert hardware.find_hardware(f"NVIDIA {name} GPU") is not None


class TestWhereItIsFound:
    @pytest.mark.parametrize("flag", ["--config-dir", "-cd"])
    @pytest.mark.parametrize("joined", [True, False])
    def test_by_a_flag(self, flag: str, joined: bool, tmp_path: Path) -> None:
        folder = folder_of(tmp_path / "a b (ü) 'q'")
        typed = [f"{flag}={folder}"] if joined else [flag, str(folder)]
        assert without_own_folders(["model=mine", *typed, "seq_len=8"]) == (
            ["model=mine", "seq_len=8"],
            [f"--config-dir={folder}"],
        )
        check_all_of("mine")

    def test_by_the_variable_several(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folders = [folder_of(tmp_path / name, name) for name in ("one", "two")]
        monkeypatch.setenv(CONFIG_VARIABLE, ":".join(map(str, folders)))
        check_all_of("one")
        check_all_of("two")

    def test_beside_the_working_folder(self, tmp_path: Path) -> None:
        folder_of(tmp_path / BESIDE)
        check_all_of("mine")

    def test_the_projects_own_stay(self, tmp_path: Path) -> None:
        before = choices("model")
        folder_of(tmp_path / BESIDE)
        assert choices("model") == sorted([*before, "mine"])
        (case,) = compose_request(["model=tiny", "device=cpu"]).cases
        assert case.model.num_layers == 4

    def test_a_relative_folder_holds_for_workers_elsewhere(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder_of(tmp_path / "own")
        without_own_folders(["--config-dir", "own"])
        (tmp_path / "other").mkdir()
        monkeypatch.chdir(tmp_path / "other")
        check_all_of("mine")

    def test_the_command_that_is_kept_names_it(self, tmp_path: Path) -> None:
        folder = folder_of(tmp_path / "own")
        arguments, flags = without_own_folders(["-cd", str(folder), "model=mine"])
        command = compose_request(arguments, flags).command
        assert command == f"attnbench --config-dir={folder} model=mine"


class TestMistakes:
    @pytest.mark.parametrize("typed", [["--config-dir"], ["-cd="], ["--config-dir", "--help"]])
    def test_a_flag_without_a_folder(self, typed: list[str]) -> None:
        with pytest.raises(ValueError, match="must be followed by a folder"):
            without_own_folders(typed)

    def test_a_folder_that_is_missing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(ValueError, match=r"^--config-dir gone: no such folder"):
            without_own_folders(["--config-dir", "gone"])
        monkeypatch.setenv(CONFIG_VARIABLE, "gone")
        with pytest.raises(ValueError, match=r"^ATTNBENCH_CONFIG=.*gone: no such folder"):
            compose_request(["model=tiny", "device=cpu"])

    @pytest.mark.parametrize("group", ["model", "sweeps"])
    def test_a_name_that_is_taken(self, group: str, tmp_path: Path) -> None:
        name = "tiny" if group == "model" else "quickstart"
        (tmp_path / BESIDE / group).mkdir(parents=True)
        (tmp_path / BESIDE / group / f"{name}.yaml").write_text(MODEL)
        with pytest.raises(ValueError, match=rf"{name}\.yaml: its name is taken by .*{name}\.yaml"):
            config_files(group)

    def test_a_name_other_than_the_files(self, tmp_path: Path) -> None:
        (tmp_path / BESIDE / "model").mkdir(parents=True)
        (tmp_path / BESIDE / "model" / "mine.yaml").write_text(MODEL)
        with pytest.raises(ValueError, match=r"mine\.yaml: name: tiny: must be mine"):
            compose_request(["model=mine", "device=cpu"])

    def test_a_file_that_is_no_yaml(self, tmp_path: Path) -> None:
        (tmp_path / BESIDE / "model").mkdir(parents=True)
        (tmp_path / BESIDE / "model" / "mine.yaml").write_text("a: [")
        with pytest.raises(ValueError, match=r"^conf: model=mine: ") as caught:
            compose_request(["model=mine", "device=cpu"])
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize("text", ["a: [", "[1]", "name: x", "match: 7"])
    def test_hardware_that_is_none(self, text: str, tmp_path: Path) -> None:
        (tmp_path / BESIDE / "hardware").mkdir(parents=True)
        (tmp_path / BESIDE / "hardware" / "mine.yaml").write_text(text)
        with pytest.raises(
            ValueError, match=r"mine\.yaml: .*like those in conf/hardware"
        ) as caught:
            hardware.find_hardware("mine")
        assert "\n" not in str(caught.value)

    def test_what_was_meant_may_be_ones_own(self, tmp_path: Path) -> None:
        folder_of(tmp_path / BESIDE)
        with pytest.raises(ValueError, match=r"did you mean mine_sweep\?"):
            load_sweep("mine_sweeep")
