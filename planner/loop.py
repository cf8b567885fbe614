"""Facts of the training loop that memory depends on.  They are inputs: a wrong guess is worth up to 16 % of the peak."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class LoopFacts:
    """The defaults are those of transformers' Trainer and of PyTorch's documentation."""

    grad_accum_steps: int = 1
    """Micro steps per optimizer step; 1 disables accumulation."""
    zero_grad: Literal["after-step", "before-forward", "before-backward"] = "after-step"
    """When the loop clears gradients: before-forward keeps them alive until the next step begins."""
    set_to_none: bool = True
    """`zero_grad(set_to_none=...)`; False keeps every gradient resident, and writes zeros into it."""
    clip_grad_norm: bool = False
    """`clip_grad_norm_` before the step."""
    keep_outputs: bool = False
    """The loop holds the model's output (logits) until the next forward has returned, as `outputs = model(**batch)` does."""
    iterations: int = 2
    """Optimizer steps that are simulated: the first, which creates the state, and one like all later ones."""

    def assumptions(self) -> list[str]:
        """In words, for the report."""
        said = [
            f"gradients are cleared {self.zero_grad.replace('-', ' ')}, "
            + ("set to None" if self.set_to_none else "kept and zeroed (set_to_none=False)")
        ]
        if self.grad_accum_steps > 1:
            said.append(f"{self.grad_accum_steps} micro steps are accumulated before each optimizer step")
        if self.clip_grad_norm:
            said.append("gradients are clipped by norm")
        said.append(
            "the loop holds the model's output through the step" if self.keep_outputs else "the loop keeps only the loss"
        )
        return said
