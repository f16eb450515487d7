"""Slurm: its commands, a job array's shares and tasks, and following them."""
