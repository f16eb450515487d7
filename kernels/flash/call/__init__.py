"""One call of flash attention: its arguments, and the facts that an implementation is chosen by."""
