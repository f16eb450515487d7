"""Training steps of one rank: phases, models, precision, compilation, checkpointing."""
