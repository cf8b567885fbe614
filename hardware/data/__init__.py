"""The catalogue: GPUs, their other names, nodes and links, each figure with its source."""
