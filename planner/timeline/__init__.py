"""Time: a discrete-event simulation of streams and links; step time, tokens per second, and what bounds them."""
