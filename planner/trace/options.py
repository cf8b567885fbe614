"""What a trace is made of: the options that decide what is recorded.  Free of torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from ...errors import UserError
from ...models.adapters import AdapterSettings, library_versions
from ..recompute.policy import PREFIX, SELECTIVE, Policy, stated_limit

PARAM_DTYPE = {
    "fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "bf16-autocast": "float32", "fp16-autocast": "float32",
    "bf16-mixed": "bfloat16", "fp16-mixed": "float16",
}  # fmt: skip
AUTOCAST_DTYPE = {"bf16-autocast": "bfloat16", "fp16-autocast": "float16"}
HALF = ("float16", "bfloat16")


@dataclass(frozen=True, kw_only=True)
class SdpaClass:
    """Which fused attention kernels a GPU has, and their limits; GPUs of one class share traces.

    Source: ATen/native/transformers/cuda/sdp_utils.cpp (torch 2.13).
    """

    flash: bool = True  # sm80 and newer
    efficient: bool = True  # sm50 and newer
    efficient_bf16: bool = True  # sm80 and newer
    flash_head_dim_limited: bool = False  # sm86, sm89, sm120: head_dim 193-224 refused in training, 225-256 with dropout
    rocm: bool = False

    @classmethod
    def of(cls, compute_capability: tuple[int, int] | None) -> SdpaClass:
        """The class of an NVIDIA GPU by (major, minor); None is an AMD GPU (flash and efficient through AOTriton)."""
        if compute_capability is None:
            return cls(rocm=True)
        new = compute_capability >= (8, 0)
        limited = compute_capability in ((8, 6), (8, 9), (12, 0), (12, 1))
        return cls(flash=new, efficient=compute_capability >= (5, 0), efficient_bf16=new, flash_head_dim_limited=limited)

    def choose(self, call: SdpaCall) -> str:
        """flash | efficient | math: the first whose conditions hold, in torch's default order."""
        if self.flash and self._flash_can(call):
            return "flash"
        if self.efficient and self._efficient_can(call):
            return "efficient"
        return "math"

    def _flash_can(self, call: SdpaCall) -> bool:
        if call.has_mask or call.dtype not in HALF or call.head_dim != call.value_dim or call.head_dim > 256:
            return False
        if call.causal and call.query_len != call.key_len:
            return False
        if self.flash_head_dim_limited and call.requires_grad and call.head_dim > 192:
            return call.head_dim > 224 and call.dropout == 0
        return call.query_heads == call.key_heads or call.gqa

    def _efficient_can(self, call: SdpaCall) -> bool:
        if call.dtype not in (*HALF, "float32") or call.query_heads != call.key_heads:
            return False  # grouped keys: refused up to torch 2.13 (check_batch_size_and_num_heads_dense<false>)
        if call.dtype == "bfloat16" and not self.efficient_bf16:
            return False
        multiple = 4 if call.dtype == "float32" else 8
        return call.head_dim % multiple == 0 and call.value_dim % multiple == 0


@dataclass(frozen=True, kw_only=True)
class SdpaCall:
    """One scaled_dot_product_attention call, as far as the choice of a kernel depends on it."""

    dtype: str
    query_len: int
    key_len: int
    query_heads: int
    key_heads: int
    head_dim: int
    value_dim: int
    has_mask: bool
    dropout: float
    causal: bool
    gqa: bool
    requires_grad: bool


@dataclass(frozen=True, kw_only=True)
class TraceOptions:
    """All that decides what is recorded; part of the key under which a trace is cached."""

    batch_size: int
    seq_len: int
    precision: str = "fp32"
    mode: str = "train"
    """train: forward, loss, backward.  forward: the graph is kept, no backward.  inference: under no_grad, in eval mode."""
    recompute: str = "none"
    """none; full: every block, by the model's own activation checkpointing where it has one; every-k:N: segments of N blocks;
    selective-layer:N: every Nth block; selective-op[:NAMES]: every block, keeping results of the named ops (joined by +);
    keep:...: what each block keeps (`recompute.policy`); selective[:GiB] becomes one before anything is traced."""
    reentrant: bool = False
    """The checkpoint variant: torch's reentrant one, or (default) the one that transformers 5 and torch recommend."""
    attention: str = "sdpa"
    target: str = "cuda"
    """Whose choices are recorded.  cpu is for comparing with a CPU run, op by op."""
    sdpa: SdpaClass = field(default_factory=lambda: SdpaClass())
    """Which fused attention kernels the GPU has; ignored for the cpu target."""
    use_cache: bool = False
    """The model builds a key-value cache while it trains, as its config asks; transformers' Trainer switches it off."""
    loss: str = "model"
    """model: the model's own; plain: cross-entropy on the logits as they are; chunked[:N]: head and loss in N chunks of tokens;
    liger: Liger's fused head and loss; tiled[:N]: DeepSpeed's TiledFusedLogitsLoss in N tiles (`loss_parts`)."""
    mlp_tiles: int | None = None
    """Every MLP runs in so many tiles of tokens, and again in backward."""
    autocast_cache: bool = True
    """autocast keeps the casts of parameters to the end of the step; it keeps none of views, as FSDP1's parameters are."""
    target_len: int | None = None
    image_size: int | None = None
    frozen: tuple[str, ...] = ()
    """Prefixes of parameter names that do not train."""
    adapter: AdapterSettings | None = None
    """What trains instead of the model's own weights."""
    blockwise: str = ""
    """badam, hift: one block of layers trains, as that method divides the model; the dearest of them."""

    def as_data(self) -> dict[str, Any]:
        """As JSON data; with an adapter also the versions of the libraries that its modules come from."""
        return {**asdict(self), "frozen": list(self.frozen), "libraries": library_versions(self.adapter)}


def recompute_parts(text: str) -> tuple[str, int, tuple[str, ...]]:
    """(kind, N, op names) of a --recompute value.  Raises UserError for one that does not exist."""
    kind, _, rest = text.partition(":")
    if kind in ("none", "full") and not rest:
        return kind, 0, ()
    if text.startswith(PREFIX):
        Policy.parse(text)
        return "keep", 0, ()
    if kind in ("every-k", "selective-layer"):
        if not rest.isdecimal() or int(rest) < 1:
            raise UserError(f"--recompute {text}: expected a number of blocks of 1 or more", f"Write for example {kind}:2")
        return kind, int(rest), ()
    if kind == SELECTIVE:
        stated_limit(text)
        return kind, 0, ()
    if kind == "selective-op":
        return "selective-op", 0, tuple(rest.split("+")) if rest else ("matmul", "attention", "max")
    raise UserError(
        f"--recompute {text!r} is not known",
        "Choose none, full, every-k:N, selective-layer:N, selective-op[:matmul+attention] or selective[:GiB]",
    )


_LOSS_PARTS = 8  # that the tokens are cut into, where the loss does so and no number is given: torchtune's and TRL's


def loss_parts(text: str) -> tuple[str, int]:
    """(kind, parts that the tokens are cut into) of a --loss value.  Raises UserError for a number where none belongs."""
    kind, colon, rest = text.partition(":")
    if not colon:
        return kind, _LOSS_PARTS if kind in ("chunked", "tiled") else 1
    if kind not in ("chunked", "tiled"):
        raise UserError(f"--loss {text}: {kind} is not cut into parts", "Only chunked:N and tiled:N are")
    if not rest.isdecimal() or int(rest) < 1:
        raise UserError(f"--loss {text}: expected a number of parts of 1 or more", f"Write for example {kind}:{_LOSS_PARTS}")
    return kind, int(rest)
