"""``python -m harness`` is the command ``attnbench``."""

from harness.commands.attnbench import main

main()
