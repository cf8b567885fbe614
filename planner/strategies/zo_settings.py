"""What a zeroth-order run is asked for: the knobs of MeZO, ZO2 and DistZO2 that memory and time depend on.

Learning rate, epsilon and weight decay are left out: they change no size.  (`weight_decay=0` saves nothing either: the product
with the parameter is computed all the same.)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from ...errors import UserError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ...models.adapters import AdapterSettings

TRAINED = ("all", "lora", "prefix-tuning")  # what MeZO's trainer perturbs (large_models/run.py: --lora, --prefix_tuning)
HOST_DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp8": "float8_e4m3fn"}


@dataclass(frozen=True, kw_only=True)
class ZoSettings:
    """The defaults are those of the zo2 package at 4bca25c (`MeZOSGDConfig`), and of MeZO's trainer where it has the knob."""

    zo_pert: int = 1
    """DistZO2: GPUs that share the two perturbed forwards of a step, 1 or 2 (PertP); 1 computes both on each GPU."""
    zo_data: int = 1
    """DistZO2: groups of `zo_pert` GPUs that share the batch; the micro batch is that of one group."""
    zo_slice: bool = False
    """DistZO2: every GPU uploads its share of a block and gets the rest from the others; needs NVLink."""
    overlap: bool = True
    """ZO2: copies run beside compute on streams of their own, from pinned memory.  False: one stream, pageable memory."""
    offloading_blocks: int | Literal["all"] = "all"
    """ZO2: how many blocks, from the first on, live on the host; the others stay on the GPU."""
    bucket: bool = False
    """ZO2: `communicate_optimize_method="bucket"`, a block moves as one flat tensor."""
    amp: bool = False
    """ZO2: fp32 on the GPU, autocast in compute, and fewer bits on the host.  Goes with --precision fp16- or bf16-autocast."""
    precision_on_offloading_device: Literal["fp16", "bf16", "fp8"] | None = None
    """ZO2 under `amp`: what the host keeps; None is fp16.  Without `amp` the host keeps the model's own dtype."""
    use_cache: bool = True
    """MeZO: the forward builds a key-value cache and holds it until the loss is there, since neither trainer clears
    `config.use_cache`.  False saves 2 * layers * batch * seq * kv_heads * head_dim elements.  ZO2 and DistZO2 build one in an
    evaluation only."""
    eval_batch: int | None = None
    """The micro batch of evaluations between steps, which have to fit as well; None: there are none."""

    def __post_init__(self) -> None:
        if self.zo_pert not in (1, 2):
            raise UserError(f"--zo-pert {self.zo_pert}: a step has two perturbed forwards", "Use 1 or 2")
        if self.zo_data < 1:
            raise UserError(f"--zo-data {self.zo_data}: must be at least 1", "Leave it out for one group")
        if self.eval_batch is not None and self.eval_batch < 1:
            raise UserError(f"--zo-eval-batch {self.eval_batch}: must be at least 1", "Leave it out for no evaluation")
        if self.offloading_blocks != "all" and self.offloading_blocks < 0:
            raise UserError(
                f"--zo-offload-blocks {self.offloading_blocks}: cannot be negative", "Use a number of blocks, or all"
            )
        kept = self.precision_on_offloading_device
        if kept is not None and kept not in HOST_DTYPES:
            hint = did_you_mean(kept, HOST_DTYPES) or f"Choose one of {', '.join(HOST_DTYPES)}"
            raise UserError(f"--zo-host-precision {kept!r} is not known", hint)
        if kept is not None and not self.amp:
            raise UserError(f"--zo-host-precision {kept}: only amp keeps another precision on the host", "Add --zo-amp")

    @property
    def gpus(self) -> int:
        return self.zo_pert * self.zo_data

    def host_dtype(self, dtype: str) -> str:
        """What the host keeps of a parameter of `dtype`."""
        return HOST_DTYPES[self.precision_on_offloading_device or "fp16"] if self.amp else dtype


def adapter_of(trained: str, given: Mapping[str, Any]) -> AdapterSettings:
    """The adapter of --zo-train, with what other options say of it."""
    from ...models.adapters import AdapterSettings

    if trained not in TRAINED:
        hint = did_you_mean(trained, TRAINED) or f"Choose one of {', '.join(TRAINED)}"
        raise UserError(f"--zo-train {trained!r} is not known", hint)
    return without_autocast(AdapterSettings.of(trained, **given))


def without_autocast(adapter: AdapterSettings) -> AdapterSettings:
    """As zeroth-order trainers have it: in the dtype of the model, and no autocast around the step."""
    return replace(adapter, adapter_dtype="base", autocast=False)
