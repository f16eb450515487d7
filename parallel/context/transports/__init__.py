"""What brings keys to queries: send/receive, collectives, reads of peers' memory."""
