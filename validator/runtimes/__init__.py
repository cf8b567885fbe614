"""Training runtimes that are run for real, so that a strategy's prediction can be compared with them."""
