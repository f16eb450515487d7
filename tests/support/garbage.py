"""Collections of garbage that pass over what modules hold."""

from __future__ import annotations

import gc
import sys

import psutil

MANY_THREADS = 48
"""A gloo group has three, one of which looks for messages a hundred times a second."""

_num_modules = 0


def leave_out_modules() -> None:
    """Have later collections pass over all that lives now, if many modules have come lately.

    What they hold lives for ever, and looking through it takes half a second each time.
    """
    global _num_modules
    if len(sys.modules) > _num_modules + 100:
        _num_modules = len(sys.modules)
        gc.collect()
        gc.freeze()


def end_unused_threads() -> None:
    """Collect garbage if this process has many threads: they may be those of groups that are gone.

    What refers to a group refers to itself too, so that nothing else frees it; hundreds of groups
    that nobody uses take most of a machine's time.
    """
    if psutil.Process().num_threads() > MANY_THREADS:
        gc.collect()
