"""Tasks that run nothing: FLOPs, bytes and messages by formula."""
