"""How each source ran its loop: the facts that no row states and that memory depends on, each with where it is to be read.

A source that is not here ran a loop that is not known: it is predicted with the planner's defaults, or, where the row names
its transformers version, as transformers' Trainer of that version runs it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Profile:
    """`loop`: fields of `LoopFacts`.  `gpu`: where the row names none.  `variant`: of the model class, a module of `published`.

    `transformers`: the version, where the row does not state it.  `stated`: where all that is to be read.
    """

    stated: str
    loop: Mapping[str, Any] = field(default_factory=dict)
    gpu: str | None = None
    variant: str | None = None
    transformers: tuple[int, int] | None = None
    torch: tuple[int, int] | None = None


_TRAINER = {"clip_grad_norm": True}  # max_grad_norm is 1.0 unless told otherwise (TrainingArguments)
_STUDENT = {"zero_grad": "before-forward", "keep_outputs": True}  # zero_grad(); logits = model(x); loss; backward; step

PROFILES: dict[str, Profile] = {
    "fms-acceleration": Profile(
        stated="scripts/benchmarks/benchmark.py: TRL's SFTTrainer, 20 steps; memory from the Trainer's own metrics",
        loop=_TRAINER,
    ),
    "hf-transformers-docs": Profile(
        stated="docs/source/en/perf_train_gpu_one.mdx: Trainer of early 2022, so torch 1.10; zero_grad() zeroes gradients",
        loop={**_TRAINER, "set_to_none": False},
        transformers=(4, 16),
        torch=(1, 10),
    ),
    "cs336-cliffkai": Profile(
        stated="cs336_systems/benchmark.py: no warm-up, one step recorded; a cuBLAS workspace of 32 MiB says Hopper",
        loop={"keep_outputs": True, "iterations": 1},
        gpu="h100-sxm-80gb",
    ),
    "cs336-wuyh11": Profile(
        stated="cs336_systems/profile_memory.py: three steps before the recorded one",
        loop=_STUDENT,
    ),
    "cs336-enzoding-rgb": Profile(
        stated="cs336_systems/memory_profiling/profile.py and gradient_checkpointing/profile.py: steps before the measured one",
        loop=_STUDENT,
    ),
    "cs336-niuhuangxiaozi": Profile(
        stated="cs336_systems/profile_memory/profile_memory.py: three iterations, the author's own modules",
        loop={**_STUDENT, "iterations": 3},
        variant="cs336_niu",
    ),
    "cs336-ctknight": Profile(stated="cs336_systems/benchmarking.py: forward under no_grad, in eval mode"),
    "cs336-wedsonlin": Profile(stated="the recorded step follows five others", loop=_STUDENT),
    "cs336-damek": Profile(stated="the assignment's loop", loop=_STUDENT),
    "rasbt": Profile(
        stated="01_pytorch-vit.py and logs.md: logits, then zero_grad, backward, step; the logits live into the next iteration",
        loop={"zero_grad": "before-backward", "keep_outputs": True},
        variant="torchvision_vit",
        torch=(2, 1),
    ),
    "liger-kernel": Profile(
        stated="benchmark/scripts/utils.py, _test_memory: ten forward and backward passes, gradients never cleared",
        loop={"grad_accum_steps": 3, "set_to_none": False, "iterations": 1},
    ),
}
"""Keyed by `source.name`."""
