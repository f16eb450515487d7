"""Transports that bring keys to queries: messages, collectives, reads of peers' memory."""
