"""Where a run happens: GPUs, links, hosts and disks as data, a node as a graph, and what this machine has."""
