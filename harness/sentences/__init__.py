"""Sentences that tables and figures support: rankings with ties, leaders, spans."""
