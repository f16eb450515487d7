"""Measures on one rank: time, memory, device state, kernel launches, traffic and traces."""
