"""MeZO, ZO2 and DistZO2 as real training steps: what the zeroth-order strategies are compared with.

Written from the published descriptions and from what zo2 0.1.1 does (github.com/liangyuwang/zo2, Apache-2.0), without its
faults: see `zo2`.  Start reading at `run`.
"""
