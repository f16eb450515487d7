"""``import attnbench``, and a wheel of it in an environment with packages of the same names."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from conftest import ROOT
from programs import need

import attnbench
from kernels import flash
from parallel import checkpoints, data, split, tensor

SOURCES = ("attnbench.py", "setup.py", "pyproject.toml", "README.md")
OTHERS = """\
import attnbench
from models import Net
print(Net.__name__, attnbench.BucketedDDP.__module__, attnbench.zigzag_attention.__name__)
try:
    attnbench.load("results")
except ImportError as error:
    print(error)
"""


def test_public_names_are_those_of_the_packages() -> None:
    for module in (split, data, tensor, checkpoints):
        assert set(module.__all__) <= set(attnbench.__all__)
    assert attnbench.flash_attention is flash.flash_attention
    assert attnbench.zigzag_attention is split.zigzag_attention
    for name in ("no_such_attention", "no_such_name"):
        with pytest.raises(AttributeError, match=f"'attnbench' has no attribute '{name}'"):
            getattr(attnbench, name)


def test_functions_of_commands() -> None:
    """They are the commands' own, which have tests of their own."""
    found = {features.name: features for features in attnbench.backends("cpu")}
    assert found["naive"].usable == "yes"
    assert "zigzag" not in found
    answer = attnbench.recommend("model=tiny", "machine=h200", "gpus=1", "attention=sdpa")
    assert answer.best is not None
    assert answer.best is answer.ranked[0]
    with pytest.raises(ValueError, match=r"^model=tyni: no such choice; there are"):
        attnbench.recommend("model=tyni")


def test_importing_loads_nothing() -> None:
    code = "import sys, attnbench; print({'torch', 'numpy', *attnbench.NEEDS} & {*sys.modules})"
    assert python(Path(sys.executable), code, cwd=ROOT).stdout == "set()\n"


class Installed:
    """A virtual environment with the wheel, and torch and others from this one."""

    def __init__(self, folder: Path) -> None:
        self.bin = folder / "bin"
        (self.packages,) = folder.glob("lib/python*/site-packages")
        self.folders = self.packages / "attnbench_folders"

    def run(self, cwd: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return run(str(self.bin / words[0]), *words[1:], cwd=cwd, **variables)


def run(*words: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """A process that no variable tells of this checkout."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "0", **variables}
    return subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True)


def python(
    program: Path, code: str, *, cwd: Path, **variables: str
) -> subprocess.CompletedProcess[str]:
    return run(str(program), "-c", code, cwd=cwd, **variables)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The wheel, built from a copy of what it is made of."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        shutil.copy(ROOT / name, folder)
    for name in (*attnbench.NEEDS, "conf", "sweeps"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
    offline = ("--no-deps", "--no-index")
    built = run(*pip, "wheel", *offline, "--no-build-isolation", "-w", "dist", ".", cwd=folder)
    wheels = list((folder / "dist").glob("*.whl"))
    why = f"setuptools, that builds offline ({built.stderr.strip()[-200:]})"
    need(str(wheels[0]) if wheels else None, why, "python3-setuptools")
    run(sys.executable, "-m", "venv", "--without-pip", "environment", cwd=folder)
    environment = Installed(folder / "environment")
    target = ("--python", str(environment.bin / "python"))
    done = run(*pip, *target, "install", *offline, str(wheels[0]), cwd=folder)
    assert done.returncode == 0, done.stderr
    # What is imported from there is not installed there: no finder of this checkout runs.
    (environment.packages / "shared.pth").write_text(sysconfig.get_path("purelib"))
    return environment


@pytest.fixture
def crowded(tmp_path: Path) -> Path:
    """A user's folder with a file and a package of our names, and a configuration."""
    (tmp_path / "models.py").write_text("class Net: pass\n")
    (tmp_path / "harness").mkdir()
    (tmp_path / "harness" / "__init__.py").touch()
    own = tmp_path / "attnbench_conf" / "model"
    own.mkdir(parents=True)
    tiny = (ROOT / "conf" / "model" / "tiny.yaml").read_text(encoding="utf-8")
    (own / "mine.yaml").write_text(tiny.replace("name: tiny", "name: mine"))
    return tmp_path


def test_a_wheel_installs_two_names(installed: Installed) -> None:
    found = {path.name for path in installed.packages.iterdir()} - {"shared.pth", "__pycache__"}
    assert {name for name in found if not name.endswith(".dist-info")} == {
        "attnbench.py",
        "attnbench_folders",
    }


def test_commands_and_workers_find_ours(installed: Installed, crowded: Path) -> None:
    """In a folder that has other files of these names, and a configuration of one's own."""
    keys = ("model=mine", "seq_len=16", "batch_size=1", "device=cpu", "results=out")
    measured = installed.run(crowded, "attnbench", *keys)
    assert measured.returncode == 0, measured.stderr
    assert "1 case: 1 ok" in measured.stdout
    done = installed.run(crowded, "attnbench-status", "out")
    assert done.stdout.startswith("1 case: 1 ok"), done.stderr
    done = installed.run(crowded, "python", "-m", "attnbench", "plan=true", *keys)
    assert "0 of 1 case to measure" in done.stdout, done.stderr


def test_a_program_keeps_its_own(installed: Installed, crowded: Path) -> None:
    done = python(installed.bin / "python", OTHERS, cwd=crowded)
    assert done.stdout == (
        "Net parallel.data.containers zigzag_attention\n"
        f"{crowded}/harness/__init__.py is imported as 'harness', and attnbench needs "
        f"{installed.folders}/harness under that name: give it another name\n"
    ), done.stderr


def test_another_distribution_of_the_name(installed: Installed, tmp_path: Path) -> None:
    """Such as Hugging Face's ``kernels``."""
    other = installed.packages / "kernels"
    other.mkdir()
    (other / "__init__.py").write_text("THEIRS = True")
    code = "import attnbench, kernels; print(kernels.THEIRS); attnbench.flash_attention"
    try:
        done = python(installed.bin / "python", code, cwd=tmp_path)
        assert done.stdout == "True\n"
        remedy = f"PYTHONPATH={installed.folders}"
        assert done.stderr.endswith(f"start the program with {remedy}, which hides that package\n")
        code = "import attnbench, kernels; print(kernels.__file__)"
        done = python(
            installed.bin / "python", code, cwd=tmp_path, PYTHONPATH=str(installed.folders)
        )
        assert done.stdout.startswith(str(installed.folders))
        assert installed.run(tmp_path, "attnbench", "plan=true", "device=cpu").returncode == 0
    finally:
        shutil.rmtree(other)


def test_a_folder_of_data_is_no_package(installed: Installed, tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "weights.pt").touch()
    code = "import attnbench, models; print(models.__file__)"
    done = python(installed.bin / "python", code, cwd=tmp_path)
    assert done.stdout.startswith(str(installed.folders)), done.stderr
    (tmp_path / "models" / "net.py").touch()
    assert python(installed.bin / "python", code, cwd=tmp_path).stdout == "None\n"
