"""FlashAttention for Hopper (compute capability 9.0) in Gluon."""
