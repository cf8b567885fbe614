"""Selective recompute: which results of which blocks are kept for backward, solved as a mixed-integer linear program."""
