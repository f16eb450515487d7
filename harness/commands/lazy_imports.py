"""Lazy imports for the console commands: a module is loaded when one of its attributes is used.

Most commands compute nothing, and torch alone takes over a second to load. After
:func:`install`, ``import torch`` binds an empty module to the name, and so does importing one of
our modules from a folder of :data:`PROJECT`. The first attribute that the empty module lacks
loads it, into the same object. So files import whatever they need at their top, and a plan loads
what it uses. ``from torch import Tensor`` uses an attribute, so it loads torch at once;
``from torch import nn`` does not, because ``torch.nn`` is a module in :data:`LIBRARIES`.

Workers import as usual. :class:`importlib.util.LazyLoader` would not do: it loads a library for
the sake of an ``import torch.distributed as dist``, and may then load the submodule twice; and
before Python 3.12 it lets a second thread see a module that the first has half loaded. Here
loading is an ordinary import, under the import system's own locks.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

LIBRARIES = (
    *("torch", "torch.distributed", "torch.nn", "torch.nn.functional"),
    *("triton", "triton.language", "numpy", "pandas", "psutil", "pynvml"),
)
"""Libraries, and those of their modules that our files import by name. Each loads as a whole."""

PROJECT = (
    *("kernels", "models", "parallel"),
    *("harness.bench", "harness.measure", "harness.profilers", "harness.run", "harness.tasks"),
)
"""Our folders of modules that compute, or start what computes, at any depth. Each module loads by
itself."""


def install() -> None:
    """Make imports lazy in this process, for modules that are not imported yet."""
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)


class LazyModule(ModuleType):
    """A module that is imported and not loaded, or that some thread is loading now."""

    def __getattr__(self, name: str) -> object:
        child = f"{self.__name__}.{name}"
        if child in LIBRARIES and _FINDER.postpones(self.__name__):
            return importlib.import_module(child)
        # matplotlib looks torch up in sys.modules, to learn whether values may be its tensors.
        asks_if_used = sys._getframe(1).f_globals.get("__name__", "").startswith("matplotlib.")
        if name not in _SET_BY_IMPORT and not asks_if_used:
            _FINDER.load(self.__name__)
        return ModuleType.__getattribute__(self, name)

    def __setattr__(self, name: str, value: object) -> None:
        # The import system binds modules to their parents, which is no use of the parent.
        if name not in _SET_BY_IMPORT and not isinstance(value, ModuleType):
            _FINDER.load(self.__name__)
        ModuleType.__setattr__(self, name, value)

    def __dir__(self) -> list[str]:
        _FINDER.load(self.__name__)
        return sorted(self.__dict__)


class LazyFinder(MetaPathFinder):
    """Finds what the other finders find, and postpones loading it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._postponed: dict[str, LazyModule] = {}
        """Modules that nobody has used yet."""
        self._wanted: dict[str, LazyModule] = {}
        """Modules that somebody has used; their next import loads them."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a module to postpone or to load; None leaves it to the other finders."""
        top = name.partition(".")[0]
        of_library = top in LIBRARIES
        if of_library and name not in LIBRARIES and top in self._postponed:
            self.load(top)
            # The library may just have imported it, and the import system would do so again.
            if module := sys.modules.pop(name, None):
                return ModuleSpec(name, _AlreadyLoaded(module))
        if name not in LIBRARIES and not name.startswith(_PROJECT_PREFIXES):
            return None
        spec = self._find_elsewhere(name, path, target)
        if spec is None or spec.loader is None:
            return None
        if name in self._wanted:
            spec.loader = _Loading(self._wanted, spec.loader)
        elif of_library:
            if name != top and top not in self._postponed:
                return None
            spec.loader = _Postponing(self._postponed)
        elif spec.submodule_search_locations is None:
            spec.loader = _Postponing(self._postponed)
        # Packages of ours hold a docstring and some names, and importing from them uses them.
        return spec

    def postpones(self, name: str) -> bool:
        """Whether a module is imported and not used yet."""
        return name in self._postponed

    def load(self, name: str) -> None:
        """Load a postponed module, or wait for the thread that is loading it.

        A module's parents are loaded before it, and a library imports its own modules in its own
        order, as without laziness.
        """
        top = name.partition(".")[0]
        with self._lock:
            names = [name]
            if top in LIBRARIES:
                names = [top, *(key for key in self._postponed if key.startswith(f"{top}."))]
            for key in names:
                if key in self._postponed:
                    self._wanted[key] = self._postponed.pop(key)
                    del sys.modules[key]
                    parent, _, child = key.rpartition(".")
                    if parent in self._wanted:
                        del self._wanted[parent].__dict__[child]
        for key in (*names, name):
            importlib.import_module(key)

    def _find_elsewhere(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> ModuleSpec | None:
        for finder in sys.meta_path:
            if finder is not self and (spec := finder.find_spec(name, path, target)):
                return spec
        return None


class _Postponing(Loader):
    """Makes an empty module."""

    def __init__(self, postponed: dict[str, LazyModule]) -> None:
        self._postponed = postponed

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return LazyModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        assert isinstance(module, LazyModule)
        self._postponed[module.__name__] = module


class _Loading(Loader):
    """Fills the module that was empty so far."""

    def __init__(self, wanted: dict[str, LazyModule], loader: Loader) -> None:
        self._wanted = wanted
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._wanted[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__dict__["__loader__"] = module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        # After an error it stays wanted, and the next use raises the error again.
        del self._wanted[module.__name__]
        if type(module) is LazyModule:
            object.__setattr__(module, "__class__", ModuleType)


class _AlreadyLoaded(Loader):
    """Returns a module that its library has loaded while it was being looked for."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._spec = module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


_SET_BY_IMPORT = ("__cached__", "__file__", "__loader__", "__package__", "__path__", "__spec__")
_PROJECT_PREFIXES = tuple(f"{folder}." for folder in PROJECT)
_FINDER = LazyFinder()
