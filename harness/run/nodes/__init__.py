"""Ranks on other hosts: agents, their leader, and what is said between them, authenticated."""
