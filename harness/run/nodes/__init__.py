"""Connections between the hosts of a run: secret, handshake, typed messages, torch's store."""
