"""Collections of garbage that pass over what modules hold."""

from __future__ import annotations

import gc
import sys

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
