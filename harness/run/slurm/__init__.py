"""Runs cases on a Slurm cluster: submission, job arrays and their tasks, Slurm's commands."""
