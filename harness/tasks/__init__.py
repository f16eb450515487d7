"""The tasks, one file each: what can be measured."""
