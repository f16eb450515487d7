"""Whether this machine's Triton compiles the Gluon kernels."""

from __future__ import annotations

from importlib.util import find_spec

import triton

OLDEST_TRITON = (3, 6)
"""Its ``warp_specialize`` takes a list of functions and arguments; that of 3.5 does not."""


def why_no_gluon() -> str | None:
    """None if the installed Triton can compile the Gluon kernels, else the reason."""
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if version < OLDEST_TRITON or find_spec("triton.experimental.gluon") is None:
        return f"the Gluon kernels need triton 3.6 or newer; this is {triton.__version__}"
    return None
