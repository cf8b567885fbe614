"""Which configuration to run: a search over methods, strategies, precisions, optimizers, recompute, offload, micro batches."""
