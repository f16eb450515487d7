"""Tasks that run nothing: FLOPs, memory and communication by formula."""
