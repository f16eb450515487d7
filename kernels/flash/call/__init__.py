"""One call of flash attention: its arguments, and the facts that decide on its implementation."""
