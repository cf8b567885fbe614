"""Ways to train one model in less memory, in one table: optimizers, methods, gradient release."""
