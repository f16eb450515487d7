"""Training steps over several ranks: strategies, traffic, memory."""
