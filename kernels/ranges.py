"""Named ranges for profilers; without a profiler they cost almost nothing.

:func:`named_range` marks what runs inside it. Without a profiler it hands out one context that
does nothing, for about a tenth of a microsecond. What is compiled has no ranges: a profiler that
changed what torch.compile sees would have it compile again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

RangeMaker = Callable[[str], contextlib.AbstractContextManager[object]]

_NOTHING: contextlib.AbstractContextManager[object] = contextlib.nullcontext()

_maker: RangeMaker | None = None


def named_range(name: str) -> contextlib.AbstractContextManager[object]:
    """A context that marks what runs inside as ``name``."""
    return _NOTHING if _maker is None else _maker(name)


@contextlib.contextmanager
def ranges_made_by(maker: RangeMaker) -> Iterator[None]:
    """While inside, every :func:`named_range` of this process is ``maker(name)``."""
    global _maker
    before, _maker = _maker, maker
    try:
        yield
    finally:
        _maker = before
