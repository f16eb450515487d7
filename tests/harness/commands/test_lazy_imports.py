"""Lazy imports: what a plan leaves unloaded, and that a module loads as if it had been imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from conftest import ROOT


def python(code: str, *folders: Path) -> str:
    """The standard output of code in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, *folders)))},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        "--help",
        "plan=true",
        "plan=true attention=flash_triton task=attention",
        "plan=true attention=ring parallel.cp=2",
        "plan=true parallel=fsdp",
        "plan=true task=decode attention=standard",
        "plan=true task=generate attention=standard",
        "plan=true profile=torch",
    ],
)
def test_a_plan_computes_nothing(arguments: str, tmp_path: Path) -> None:
    """Else each costs a second more: see benchmarks/bench_harness.py."""
    keys = [] if arguments.startswith("-") else [f"results={tmp_path}", "device=cpu"]
    code = f"""
        import sys
        from harness.commands import console
        sys.argv = ["attnbench", *{arguments.split()!r}, *{keys!r}]
        try:
            assert console.attnbench() == 0
        finally:
            loaded = {{"torch._C", "triton.runtime", "pandas._libs"}} & set(sys.modules)
            print("\\nloaded:", sorted(loaded))
    """
    assert python(code).endswith("\nloaded: []\n")


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A library in the manner of torch: its package imports its modules, and takes a while."""
    folder = tmp_path / "slow"
    folder.mkdir()
    (folder / "__init__.py").write_text(
        "import time, sys\n"
        "print('loading', end=' ')\n"
        "from slow import nn\n"
        "time.sleep(0.2)\n"
        "import slow.other\n"
        "class Tensor: pass\n"
        "def __getattr__(name):\n"
        "    if name == 'on_demand': return 3\n"
        "    raise AttributeError(name)\n"
    )
    (folder / "nn.py").write_text("import slow\nprint('nn', end=' ')\nones = 1\n")
    (folder / "other.py").write_text("print('other', end=' ')\ntwos = 2\n")
    return tmp_path


INSTALL = """
from harness.commands import lazy_imports
lazy_imports.LIBRARIES = ("slow", "slow.nn")
lazy_imports.install()
import sys
def lazy(name): return type(sys.modules[name]) is lazy_imports.LazyModule
"""


@pytest.mark.parametrize(
    ("code", "printed"),
    [
        ("import slow, slow.nn as nn\nassert lazy('slow') and lazy('slow.nn')", ""),
        ("import slow.nn as nn\nprint(nn.ones)", "loading nn other 1\n"),
        ("import slow\nprint(slow.nn.ones)", "loading nn other 1\n"),
        ("from slow import nn\nassert lazy('slow') and lazy('slow.nn')", ""),
        (
            "from slow import nn as n\nassert n.ones == 1 and sys.modules['slow'].nn is n",
            "loading nn other ",
        ),
        ("import slow\nprint(slow.on_demand)", "loading nn other 3\n"),
        ("from slow import Tensor\nprint(Tensor.__name__)", "loading nn other Tensor\n"),
        ("import slow, slow.other\nprint(slow.other.twos)", "loading nn other 2\n"),
        ("import slow, slow.nn as nn\nslow.Tensor\nassert slow.nn is nn", "loading nn other "),
        (
            "import slow\nslow.Tensor\nimport slow.nn\nassert not lazy('slow.nn')",
            "loading nn other ",
        ),
        ("import slow\nassert 'Tensor' in dir(slow)", "loading nn other "),
        ("import slow\nslow.added = 5\nprint(slow.added)", "loading nn other 5\n"),
        (
            "import slow, pickle\nx = slow.Tensor()\nassert not lazy('slow')\n"
            "assert type(pickle.loads(pickle.dumps(x))) is slow.Tensor\n"
            "assert sys.modules['slow'] is slow and slow.__spec__.loader is slow.__loader__",
            "loading nn other ",
        ),
    ],
)
def test_a_library_loads_once_and_in_its_own_order(library: Path, code: str, printed: str) -> None:
    assert python(INSTALL + code, library) == printed


def test_every_thread_sees_a_whole_module(library: Path) -> None:
    code = """
import threading, slow, slow.nn as nn
seen = []
def use(index): seen.append(slow.Tensor if index % 2 else nn.ones)
threads = [threading.Thread(target=use, args=(index,)) for index in range(8)]
[thread.start() for thread in threads]; [thread.join() for thread in threads]
print(len(seen))
"""
    assert python(INSTALL + code, library) == "loading nn other 8\n"


def test_errors_are_those_of_the_import(library: Path) -> None:
    """A library that is not there fails where it is imported, a broken one where it is used."""
    (library / "slow" / "other.py").write_text("raise OSError('no driver')\n")
    code = """
lazy_imports.LIBRARIES += ("nowhere",)
try: import nowhere
except ModuleNotFoundError as error: print(error)
import slow
for _ in range(2):
    try: slow.Tensor
    except OSError as error: print(error)
"""
    printed = "No module named 'nowhere'\nloading nn no driver\nloading no driver\n"
    assert python(INSTALL + code, library) == printed


def test_dataclasses_and_hints_of_a_postponed_module() -> None:
    """A choice is loaded by its registry, with everything that it registers."""
    code = """
        import dataclasses, json, sys, typing
        from harness.commands import lazy_imports
        lazy_imports.install()
        import kernels.backends.sdpa as sdpa
        assert type(sdpa) is lazy_imports.LazyModule
        from kernels import BACKENDS
        target = BACKENDS["sdpa_flash"].target
        assert target is sdpa.Sdpa and "sdpa_math" in BACKENDS._entries
        hints = {key: str(value) for key, value in typing.get_type_hints(target).items()}
        print(json.dumps([hints, dataclasses.asdict(target(name="sdpa_flash", kernel="flash"))]))
    """
    hints, options = json.loads(python(code))
    assert hints["kernel"] == "<class 'str'>"
    assert options.items() >= {"name": "sdpa_flash", "kernel": "flash"}.items()


def test_a_figure_does_not_load_torch() -> None:
    """matplotlib asks every value whether it is a tensor, if there is a module called torch."""
    code = """
        import sys
        from harness.commands import lazy_imports
        lazy_imports.install()
        import torch
        from matplotlib.figure import Figure
        Figure().subplots().plot([0, 1], [1, 2])
        print("torch._C" in sys.modules)
    """
    assert python(code) == "False\n"


def test_reading_records_does_not_load_torch() -> None:
    """Else every command that shows results costs two seconds more: all tasks declare columns."""
    code = """
        import sys
        from harness.commands import lazy_imports
        lazy_imports.install()
        from harness.analysis.frame import declared_columns
        assert any(column.name == "layer_norm" for column in declared_columns([]))
        print("torch._C" in sys.modules)
    """
    assert python(code) == "False\n"
