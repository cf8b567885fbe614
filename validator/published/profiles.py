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

    `build`: arguments of that module's factory; `forward_only`: over these, where a row has no backward pass.
    `config`: of the model, and `attention`, where a row says nothing.  `gb_bytes`: of a GB of its figures, which the rows take
    to be 10^9.  `counts_driver`: NVML's first memory call (nvmlDeviceGetMemoryInfo), whose `used` holds what the driver keeps
    from all programs.
    `logits`: how a source that computes its own loss does so, a key of `language_models.LOGITS`.  `transformers`, `torch`: the
    version, where the row does not state it.  `alloc_conf`: what its runs set PYTORCH_CUDA_ALLOC_CONF to.

    Of several GPUs: `fsdp`, `deepspeed`: fields of `FsdpSettings` and `DeepSpeedSettings` as its launcher sets them, the types
    where it mixes precisions; `own`: kinds of parallelism that it wrote itself, and the planner's strategy that holds the same
    bytes ("" where none does); `loop_of_several`: in place of `loop`, where these runs had another; `adapter_of_several`:
    fields of `AdapterSettings` that it sets there.  `fused_norms`: where its losses are fused, so is RMSNorm.
    `adapts_itself`: its model class has the adapter, instead of peft.

    `later_tokens`: its longest sample, which a row names, is in the first micro step, and later ones have as many as this.

    `use_cache`: its model builds a key-value cache in training.  `mean_tokens`: of a batch as its own log gives them, in place
    of the longest that a row of kind "assumed-full" names, where the figure is a mean over batches.

    `stated`: where all that is to be read.
    """

    stated: str
    loop: Mapping[str, Any] = field(default_factory=dict)
    gpu: str | None = None
    variant: str | None = None
    build: Mapping[str, Any] = field(default_factory=dict)
    forward_only: Mapping[str, Any] = field(default_factory=dict)
    transformers: tuple[int, int] | None = None
    torch: tuple[int, int] | None = None
    logits: str | None = None
    fsdp: Mapping[str, Any] = field(default_factory=dict)
    deepspeed: Mapping[str, Any] = field(default_factory=dict)
    own: Mapping[str, str] = field(default_factory=dict)
    loop_of_several: Mapping[str, Any] | None = None
    adapter_of_several: Mapping[str, Any] = field(default_factory=dict)
    alloc_conf: str = ""
    fused_norms: bool = False
    adapts_itself: bool = False
    later_tokens: int | None = None
    use_cache: bool = False
    mean_tokens: int | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    attention: str | None = None
    gb_bytes: int = 1_000_000_000
    counts_driver: bool = False


_TRAINER = {"clip_grad_norm": True}  # max_grad_norm is 1.0 unless told otherwise (TrainingArguments)
_STUDENT = {"zero_grad": "before-forward", "keep_outputs": True}  # zero_grad(); logits = model(x); loss; backward; step

PROFILES: dict[str, Profile] = {
    "fms-acceleration": Profile(
        stated="scripts/benchmarks/benchmark.py: TRL's SFTTrainer, 20 steps; memory from the Trainer's own metrics; "
        "accelerate.yaml and accelerate 1.0.1 (commands/launch.py, `--fsdp_use_orig_params`; dataclasses.py, "
        "`set_mixed_precision`): original parameters, all types narrow; accelerated-peft, autogptq_utils.py: GPTQ's packed "
        "weights become parameters for FSDP; trl 0.13, SFTTrainer.__init__ (`is_sharded_qlora`): nothing is upcast there; "
        "transformers 4.48, LlamaModel.forward: checkpoints are around the blocks, so around FSDP's units; "
        "fused-ops-and-kernels, configs/fast_kernels*.yaml: fast_rms_layernorm",
        fused_norms=True,
        loop=_TRAINER,
        adapter_of_several={"packed_as_parameters": True, "upcast": False},
        fsdp={
            "use_orig_params": True,
            "reduce_dtype": "bfloat16",
            "buffer_dtype": "bfloat16",
            "units_inside_checkpoints": True,
        },
    ),
    "hf-transformers-docs": Profile(
        stated="docs/source/en/perf_train_gpu_one.mdx: Trainer of early 2022, so torch 1.10; zero_grad() zeroes gradients",
        loop={**_TRAINER, "set_to_none": False},
        transformers=(4, 16),
        torch=(1, 10),
    ),
    "zo2": Profile(
        stated="test/mezo_sgd/hf_opt/test_memory.py and utils.py: an untied head, random weights, 30 steps; README at cbceca5: "
        "GB are MiB / 1000, and max_memory_allocated of the same runs is that of eager attention",
        config={"tie_word_embeddings": False},
        attention="eager",
        gb_bytes=1000 << 20,
        counts_driver=True,
    ),
    "torchtitan": Profile(
        stated="train.py (zero_grad, forward, loss, clip_grad_norm_, step), parallelize_llama.py (`apply_fsdp`: all units drop "
        "what they gathered; gradients are reduced in fp32) and run_llama_train.sh (expandable segments), December 2024",
        loop={"zero_grad": "before-forward", "clip_grad_norm": True},
        variant="torchtitan_llama",
        fsdp={"reshard_after_forward": True, "reduce_dtype": "float32"},
        alloc_conf="expandable_segments:True",
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
        stated="cs336_systems/memory_profiling/profile.py and gradient_checkpointing/profile.py: steps before the measured "
        "one; a forward pass alone makes no loss; cs336-basics: the course's edition of 2026",
        loop=_STUDENT,
        build={"edition": 2026, "loss": "by-hand"},
        forward_only={"loss": "none"},
    ),
    "cs336-niuhuangxiaozi": Profile(
        stated="cs336_systems/profile_memory/profile_memory.py: three iterations, the author's own modules",
        loop={**_STUDENT, "iterations": 3},
        variant="cs336_niu",
    ),
    "cs336-ctknight": Profile(stated="cs336_systems/benchmarking.py: forward under no_grad, in eval mode"),
    "cs336-wedsonlin": Profile(
        stated="cs336_systems/nsys_profile.py: the recorded step follows five others; its names keep logits and loss to the "
        "end; cs336-basics: the course's edition of 2026.  Two GPUs: sharded_optimizer.py (the first step, a function makes "
        "the loss) and ddp.py (`OptimizedDDP` averages each gradient where it lies)",
        loop={"zero_grad": "after-step", "keep_outputs": True},
        build={"edition": 2026, "loss": "by-hand"},
        forward_only={"loss": "none", "inference_mode": True},
        loop_of_several={"zero_grad": "before-forward", "iterations": 1},
        own={"ddp": "single"},
    ),
    "cs336-damek": Profile(
        stated="cs336_systems/benchmarking_scripts/benchmarking_script.py: a function makes logits and loss, under no_grad "
        "too, and one step of the optimizer ends the run; cs336-basics: the course's edition of 2025",
        loop={"zero_grad": "before-forward", "iterations": 1},
        build={"edition": 2025, "loss": "by-hand"},
    ),
    "rasbt": Profile(
        stated="01_pytorch-vit.py and logs.md: logits, then zero_grad, backward, step; the logits live into the next iteration",
        loop={"zero_grad": "before-backward", "keep_outputs": True},
        variant="torchvision_vit",
        torch=(2, 1),
    ),
    "universal-llm-trainer": Profile(
        stated="src/models/llama3.py, forward: cross entropy of the 16-bit logits without their last token, which are deleted "
        "before backward (del_logits_after_forward); src/trainer/trainer.py, optimizer_step: clips at 10.0, zero_grad after "
        "it; src/trainer/build.py, get_wrapped_model, and config/llm_llama2_full_fsdp.yaml: units by size, no no_sync anywhere",
        loop={"clip_grad_norm": True},
        logits="shifted-narrow",
        fsdp={"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 10_000, "no_sync": False},
    ),
    "peft": Profile(
        stated="the table of README.md is of December 2022 (commit 5de175184), when torch was 1.13",
        torch=(1, 13),
    ),
    "peft/metamath": Profile(
        stated="method_comparison/MetaMathQA/run.py: outputs, loss and gradients live until the next step, and outputs hold "
        "the cache that model.config leaves on; the figure is a mean over batches sorted by length (utils.py, "
        "`BucketIterator`), and every result of it has 4,198,051 train total tokens in 20,000 train samples: padding adds a "
        "few more, which no result has; no batch is longer than the 768 tokens that a sample may have",
        loop={"zero_grad": "before-forward", "keep_outputs": True, "clip_grad_norm": True},
        use_cache=True,
        mean_tokens=210,
    ),
    "litgpt": Profile(
        stated="finetune/lora.py (between 6178c7c and 94eba0b): the longest sample is in the first micro step of all, before "
        "there are gradients or states, and logits live through backward; FSDPStrategy wraps and recomputes `Block`, "
        "Fabric's default is original parameters, and all micro steps but the last of many are under no_sync; "
        "tutorials/oom.md: half of the samples have more than 110 tokens",
        loop={"grad_accum_steps": 1, "iterations": 1, "keep_outputs": True},
        loop_of_several={"grad_accum_steps": 3, "iterations": 1, "keep_outputs": True},
        later_tokens=110,
        fsdp={"use_orig_params": True, "transformer_layer_cls_to_wrap": ("Block",)},
        variant="litgpt",
        adapts_itself=True,
    ),
    "liger-kernel": Profile(
        stated="benchmark/scripts/utils.py, _test_memory: ten forward and backward passes, gradients never cleared",
        loop={"grad_accum_steps": 3, "set_to_none": False, "iterations": 1},
    ),
}
"""Keyed by `source.name`, or by `group` where the runs of one source differ."""
