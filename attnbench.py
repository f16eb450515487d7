"""attnbench for programs of one's own, and the entry points of its commands.

    import attnbench

    frame = attnbench.load("results/local")
    o = attnbench.zigzag_attention(q, k, v, causal=True)
    model = attnbench.BucketedDDP(model)

docs/reference.md lists every name. A name is imported when it is first used, so that the module
itself costs a few milliseconds, and torch only what needs it.

The folders of the project keep their names as packages: ``kernels``, ``models``, ``parallel`` and
``harness``. They are common names, so a wheel does not put them among installed packages but into
a folder of their own, which a finder of this module searches. In a program, another package or
file of one of these names comes first, and what needs ours says so in one line. In a command and
its worker processes, ours come first.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

_HERE = Path(__file__).resolve().parent
_INSTALLED = _HERE / "attnbench_folders"

FOLDERS = _INSTALLED if _INSTALLED.is_dir() else _HERE
"""The folder that holds the project's folders: that of a wheel, or the checkout."""

NEEDS = {
    "kernels": ("kernels",),
    "models": ("models", "kernels"),
    "parallel": ("parallel", "kernels"),
    "harness": ("harness", "models", "parallel", "kernels"),
}
"""Each package of the project, and those that it imports."""

PUBLIC: dict[str, dict[str, tuple[str, ...]]] = {
    "Results, backends, recommendations": {
        "harness": ("load",),
        "harness.commands.backends": ("backends",),
        "harness.commands.recommend": ("recommend",),
    },
    "Attention on one device": {
        "kernels.flash": ("flash_attention",),
        "kernels.decode": ("flash_decode", "mla_decode"),
    },
    "Attention on split sequences": {
        "parallel.split": (
            *("split_attention", "stream_attention", "bound_attention", "split_sdpa"),
            *("register_with_transformers", "scheme_names", "shard", "unshard"),
            *("shard_stream", "unshard_stream", "position_ids", "stream_position_ids"),
            *("local_cu_seqlens", "stream_part", "next_token_labels", "release"),
        ),
    },
    "Data parallelism": {
        "parallel.data": (
            *("NaiveDDP", "FlatDDP", "OverlappedDDP", "BucketedDDP"),
            *("ShardedOptimizer", "Zero1", "Zero2", "FSDP"),
            *("AgreeingGradScaler", "optimizer_of_shards"),
        ),
    },
    "Checkpoints": {
        "parallel.checkpoints": (
            *("save_checkpoint", "save_checkpoint_in_background"),
            *("load_checkpoint", "sharded_state_dict"),
        ),
    },
    "Tensor parallelism": {
        "parallel.tensor": (
            *("ColumnParallel", "RowParallel", "GatherInput", "GatheredColumnParallel"),
            *("SequenceParallelNorm", "VocabParallelEmbedding"),
            *("vocab_parallel_cross_entropy", "split_transformer", "whole_parameters"),
            "gradient_norm",
        ),
    },
}
"""The public names, by subject and by the module that has them."""

_HOMES = {
    name: module
    for modules in PUBLIC.values()
    for module, names in modules.items()
    for name in names
} | {"__version__": "harness"}

_SCHEMES = "parallel.split"
_SCHEME_SUFFIX = "_attention"

__all__ = sorted(name for name in _HOMES if name != "__version__")


def __getattr__(name: str) -> Any:
    """A public name, imported when first used (PEP 562); NAME_attention is one of scheme NAME."""
    if name == "commands":
        return _commands()
    home = _HOMES.get(name)
    if home is None and name.endswith(_SCHEME_SUFFIX) and not name.startswith("_"):
        home = _SCHEMES
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    top = home.partition(".")[0]
    _require_ours(NEEDS[top])
    try:
        found = getattr(importlib.import_module(home), name)
    except AttributeError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Finder:
    """Finds the project's packages in :data:`FOLDERS`."""

    comes_first = False
    """Whether other packages and files of these names are passed over."""

    def find_spec(
        self, name: str, path: object = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Our package of this name, unless it is somebody else's."""
        if name not in NEEDS or (not self.comes_first and self.elsewhere(name) is not None):
            return None
        return PathFinder.find_spec(name, [str(FOLDERS)])

    def elsewhere(self, name: str) -> ModuleSpec | None:
        """What a program would import under this name without us; None for a folder of data."""
        for finder in sys.meta_path:
            if not isinstance(finder, _Finder) and (spec := finder.find_spec(name, None)):
                return spec if spec.origin or _hold_python(spec) else None
        return None


def _hold_python(namespace: ModuleSpec) -> bool:
    """Whether a folder without ``__init__.py``, such as one of checkpoints, holds modules."""
    folders = namespace.submodule_search_locations or ()
    found = (path for folder in folders for path in Path(folder).glob("*"))
    return any(path.suffix == ".py" or any(path.glob("*.py")) for path in found)


def _require_ours(names: Iterable[str]) -> None:
    """Raise ImportError, in one line, if a name that we need is another's in this process."""
    for name in names:
        spec = importlib.util.find_spec(name)
        if spec is None:
            raise ImportError(f"attnbench: {FOLDERS / name} is missing; install attnbench again")
        theirs = spec.origin or next(iter(spec.submodule_search_locations or ()), "")
        if Path(theirs).resolve().is_relative_to(FOLDERS / name):
            continue
        remedy = "give it another name"
        if {"site-packages", "dist-packages"} & set(Path(theirs).parts):
            remedy = f"start the program with PYTHONPATH={FOLDERS}, which hides that package"
        raise ImportError(
            f"{theirs} is imported as {name!r}, and attnbench needs {FOLDERS / name} "
            f"under that name: {remedy}"
        )


def _commands() -> ModuleType:
    """The entry points of the commands, whose process is ours: our packages come first in it."""
    _FINDER.comes_first = True
    _require_ours(NEEDS)
    return importlib.import_module("harness.commands.console")


_FINDER = _Finder()
sys.meta_path.insert(0, _FINDER)

if __name__ == "__main__":
    if not sys.flags.safe_path:
        # The working folder, which neither the console script nor the workers search.
        del sys.path[0]
    sys.exit(_commands().attnbench())
