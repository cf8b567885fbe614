"""Errors whose cause is known and not modelled yet, and errors that are not explained: (rows, what is known)."""

CAUSES: tuple[tuple[str, str], ...] = (
    (
        "rasbt-vitl-05-ga",
        "torch.optim's foreach Adam made its denominator out of place before torch 2.1: a second copy of the parameters",
    ),
    (
        "cs336-niuhuangxiaozi, reserved",
        "the author's own optimizer replaces parameters and state at every step, which fragments the cache",
    ),
    (
        "fms-acceleration, nvidia_smi_minus_idle",
        "what the process reserved while it loaded the model is not modelled; the rest is not explained",
    ),
    (
        "universal-llm-trainer, 8B models",
        "the source's own trainer: its loss is taken for that of transformers 4.49, and the unit of its table is in doubt",
    ),
    ("peft-readme-T0_3B", "the row assumes a foreach step; torch before 2.0 stepped one parameter at a time"),
    ("automodel-l32-1b-baseline", "not explained: the loop of the source is not known"),
    ("every source with convolutions", "cuDNN's workspaces: their sizes are not published"),
)
