"""``python -m harness`` is the command ``attnbench``."""

import sys

from harness.commands.console import attnbench

sys.exit(attnbench())
