"""Errors whose cause is known and not modelled yet: (rows, cause)."""

CAUSES: tuple[tuple[str, str], ...] = (
    (
        "rasbt-vitl-05-ga",
        "torch.optim's foreach Adam made its denominator out of place before torch 2.1: a second copy of the parameters",
    ),
    (
        "cs336-niuhuangxiaozi, reserved",
        "the author's own optimizer replaces its state at every step, which fragments the cache",
    ),
    ("every source with convolutions", "cuDNN's workspaces: their sizes are not published"),
)
