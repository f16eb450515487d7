"""Settings and fixtures that all tests share."""

from __future__ import annotations

import gc
import getpass
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from garbage import leave_out_modules
from triton_interpreter import patch_the_language_once

# Nearly nothing of what is imported and collected becomes garbage, and looking for it again and
# again takes a third of the time; what has been collected then is left out of later looks.
gc.disable()

ROOT = Path(__file__).parents[1]

# When an assertion in them fails, it shows its values, as one in a test file does.
pytest.register_assert_rewrite(
    *("attention_by_definition", "data_parallel_training", "decode_checks", "exact_attention"),
    "fault_folders",
)

# Fixtures of the write-up's tests, which several files share.
pytest_plugins = ("writeup_folder",)

Command = Callable[..., subprocess.CompletedProcess[str]]

# Threads of one process that wait for each other, as those of small shapes mostly do, would keep
# other processes from working.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))

# Every command that a test runs imports the project anew: compiling its modules each time, as
# this variable asks for in many containers, would take longer than some of the tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# For every vector instruction set that the CPU has, Inductor would otherwise compile a program
# to see whether the compiler knows it: ten seconds and more in every process.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

# The same examples in every run, however slow the machine is meanwhile.
hypothesis.settings.register_profile(
    "attnbench",
    deadline=None,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("attnbench")

if not torch.cuda.is_available():
    # Read once, when triton is imported: its kernels then run on a CPU, slowly.
    os.environ.setdefault("TRITON_INTERPRET", "1")
if os.environ.get("TRITON_INTERPRET") == "1":
    patch_the_language_once()


def pytest_configure(config: pytest.Config) -> None:
    """Give each of several processes a folder of temporary files, beside pytest's own.

    Commands on one device take turns, by a lock in that folder; those of tests that run at the
    same time are not to wait for each other. Pytest removes all of it some runs later.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is None:
        return
    temporary = Path(config.option.basetemp).parent / f"tmp-{worker}"
    temporary.mkdir()
    caches = (compiled_folder(config) or temporary) / "inductor"
    caches.mkdir(exist_ok=True)
    (temporary / f"torchinductor_{getpass.getuser()}").symlink_to(caches)
    os.environ["TMPDIR"] = str(temporary)
    tempfile.tempdir = None


def compiled_folder(config: pytest.Config) -> Path | None:
    """Where all processes keep what C++ compilers made, under hashes of sources and compilers.

    It is in pytest's cache, for the next run too, which saves a minute; ``make clean`` removes it.
    None with ``-p no:cacheprovider``.
    """
    cache = getattr(config, "cache", None)
    versions = f"{sys.implementation.cache_tag}-torch-{torch.__version__}"
    return None if cache is None else Path(cache.mkdir(f"compiled-{versions}"))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With ``-m gpu`` read only files that name the marker; to read all takes 23 s, not 6."""
    wanted = re.fullmatch(r"((?:multi)?gpu)(?: and not \w+)*", config.option.markexpr)
    if wanted is None or not collection_path.match("test_*.py"):
        return None
    return f"mark.{wanted[1]}" not in collection_path.read_text() or None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out exhaustive tests unless ``-m`` names them; run files that use the command first.

    The latter take longest, and a process that begins one when the other has nothing left works
    alone. An expression in ``addopts`` would not do: ``-m gpu`` replaces it.
    """
    if "exhaustive" not in config.option.markexpr:
        exhaustive = [item for item in items if item.get_closest_marker("exhaustive")]
        config.hook.pytest_deselected(items=exhaustive)
        items[:] = [item for item in items if not item.get_closest_marker("exhaustive")]
    runs_commands = {item.path for item in items if "command" in getattr(item, "fixturenames", ())}
    items.sort(key=lambda item: item.path not in runs_commands)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    leave_out_modules()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """The bench collects garbage several times a case."""
    leave_out_modules()


def pytest_report_header() -> str:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return f"CUDA devices: {count}; tests marked gpu and multigpu skip without them"


@pytest.fixture(autouse=True, scope="session")
def no_records_are_rescued_at_home(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Tests of full disks leave nothing in the user's own folders."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))


@pytest.fixture(autouse=torch.cuda.is_available())
def gpu_memory_is_given_back() -> Iterator[None]:
    """Several processes share a GPU, and each would keep the most that any of its tests needed."""
    yield
    torch.cuda.empty_cache()


@pytest.fixture
def exact_float32() -> None:
    """Matrix multiplications in float32, not in TF32."""
    torch.set_float32_matmul_precision("highest")


@pytest.fixture(scope="session")
def command() -> Command:
    """Runs ``attnbench`` as a user does, without a GPU, and returns how it ended."""

    def run(
        *arguments: str, environment: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "harness", *arguments],
            cwd=ROOT,
            env={
                **os.environ,
                "CUDA_VISIBLE_DEVICES": "",
                "TRITON_INTERPRET": "0",
                **(environment or {}),
            },
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )

    return run


@pytest.fixture(scope="session")
def native_folder(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Point all test processes at the autograd node that one of them has built."""
    return (compiled_folder(pytestconfig) or tmp_path_factory.getbasetemp()) / "native"


@pytest.fixture(scope="session")
def native_module(native_folder: Path) -> Any:
    """The compiled autograd node."""
    from programs import need_program

    from kernels.flash import native

    need_program("g++", "g++")
    return native.build(native_folder)
