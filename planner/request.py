"""A question to memplan, in types: what is trained, on what, and how."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ..errors import CannotTell, UserError, did_you_mean
from ..models.adapters import ADAPTER_METHODS, AdapterSettings
from .loop import LoopFacts
from .optimizers.methods import METHODS as OPTIMIZER_METHODS
from .optimizers.refusals import refuse
from .strategies import DISTRIBUTED, RELAY, SINGLE, ZEROTH_ORDER, check_strategy
from .trace.options import loss_parts, recompute_parts

if TYPE_CHECKING:
    from ..hardware.profile import Device
    from ..models import ModelSpec
    from .strategies.deepspeed_settings import DeepSpeedSettings
    from .strategies.fsdp_settings import FsdpSettings
    from .strategies.l2l import L2lSettings
    from .strategies.zo_settings import ZoSettings

PRECISIONS = ("fp32", "bf16", "fp16", "bf16-autocast", "fp16-autocast", "bf16-mixed", "fp16-mixed")
METHODS = ("full", *ADAPTER_METHODS, *ZEROTH_ORDER, *OPTIMIZER_METHODS, RELAY)
STRATEGIES = (SINGLE, "release", *DISTRIBUTED)
MODES = ("train", "forward", "inference")
ATTENTIONS = ("sdpa", "eager", "flash_attention_2")
LOSSES = ("model", "plain", "shifted", "chunked", "liger", "tiled")
# Other spellings that people use, by option.
ALIASES = {"attention": {"flash2": "flash_attention_2"}, "loss": {"hf": "model"}}
_TILED_LOSS_STRATEGIES = (SINGLE,)
# Strategies whose treatment of frozen parameters beside trained ones is modelled.
_ADAPTER_STRATEGIES = (SINGLE, "release", "ddp", "zero0", "zero1", "zero2", "zero3", "fsdp1", "fsdp2", "hsdp")
# What can leave the GPU, by where it goes.
OFFLOADS = {"cpu": ("optimizer", "param", "activation"), "nvme": ("optimizer:nvme", "param:nvme")}
DEFAULT_MICRO_BATCH_SIZE = 1
DEFAULT_SEQ_LEN = 2048  # capped by the model's positions
DEFAULT_IMAGE_SEQ_LEN = 0

# Words of the command line that this version does not plan yet.  Asking for one is no mistake: the answer is unknown.
_LATER_METHODS = ("boft", "waveft", "shira", "unilora", "freeze", "lisa")


@dataclass(frozen=True, kw_only=True)
class Request:
    """One configuration to predict.  `model` and `device` are resolved already."""

    model: ModelSpec
    device: Device
    micro_batch_size: int = DEFAULT_MICRO_BATCH_SIZE
    seq_len: int = DEFAULT_SEQ_LEN
    target_len: int | None = None
    image_size: int | None = None
    precision: str = "fp32"
    method: str = "full"
    strategy: str = "single"
    optimizer: str = "adamw"
    optimizer_impl: str = "default"
    recompute: str = "none"
    reentrant: bool = False
    attention: str = "sdpa"
    loss: str = "model"
    mlp_tiles: int | None = None
    """Tiles of tokens in which every MLP runs (DeepSpeed's TiledMLP); None: as it is."""
    mode: str = "train"
    use_cache: bool = False
    """The model builds a key-value cache in training (config.use_cache); transformers' Trainer switches it off."""
    gpus: int = 1
    """Of all machines together: the world size."""
    nodes: int = 1
    rank: int | None = None
    """The rank that is shown; None: the most loaded one."""
    offload: tuple[str, ...] = ()
    """What leaves the GPU, of `OFFLOADS`."""
    deepspeed: DeepSpeedSettings | None = None
    """Knobs of the DeepSpeed engine; None: its defaults."""
    fsdp: FsdpSettings | None = None
    """Knobs of FSDP; None: torch's defaults."""
    zo: ZoSettings | None = None
    """Knobs of zeroth-order training; None: the defaults."""
    l2l: L2lSettings | None = None
    """Knobs of a layer-to-layer relay; None: the defaults."""
    adapter: AdapterSettings | None = None
    """What an adapter method trains; None: the method's defaults."""
    host_ram_bytes: int | None = None
    """Memory of each machine; None: not known, so that it cannot be too small."""
    nvme_bytes: int | None = None
    frozen: tuple[str, ...] = ()
    compiled: bool = False
    """The run uses torch.compile, which is not modelled."""
    alloc_conf: str = ""
    loop: LoopFacts = field(default_factory=LoopFacts)
    defaults: tuple[str, ...] = ()
    """What was not given and therefore taken, in words."""

    def check(self) -> None:
        """Raises UserError for a value that does not exist, CannotTell for one that is not modelled yet."""
        from ..models import check_sizes

        check_sizes(self.model, self.micro_batch_size, self.seq_len)
        one_of("--precision", self.precision, PRECISIONS)
        one_of("--mode", self.mode, MODES)
        one_of("--attention", self.attention, ATTENTIONS)
        one_of("--method", self.method, METHODS, _LATER_METHODS)
        one_of("--strategy", self.strategy, STRATEGIES)
        recompute_parts(self.recompute)
        self._check_loss()
        self._check_adapter()
        self._check_strategy()
        if self.loop.grad_accum_steps < 1:
            raise UserError(f"--grad-accum {self.loop.grad_accum_steps}: must be at least 1", "Leave it out for none")
        for name, value in (
            ("--tiled-mlp", self.mlp_tiles),
            ("--target-len", self.target_len),
            ("--image-size", self.image_size),
            ("--gpus", self.gpus),
        ):
            if value is not None and value < 1:
                raise UserError(f"{name} {value}: must be at least 1", "Leave it out for the default")
        if self.compiled:
            raise CannotTell(
                "torch.compile is not modelled: its kernels keep and recompute other tensors than eager ones. "
                "Use --assume-eager for the eager answer"
            )

    def _check_loss(self) -> None:
        name, _ = loss_parts(self.loss)
        one_of("--loss", name, LOSSES)
        if name == "tiled" and self.strategy not in _TILED_LOSS_STRATEGIES:
            raise CannotTell(
                f"--loss tiled with --strategy {self.strategy} is not modelled: the head's gradient is ready once a "
                "tile, in forward. Use --loss chunked"
            )

    def _check_adapter(self) -> None:
        settings = self.adapter_settings
        if settings is None:
            return
        if self.method in ZEROTH_ORDER:
            settings.check()
            return  # its door says the rest
        if self.method not in ADAPTER_METHODS:
            raise UserError(f"--method {self.method} has no adapter", f"Choose one of {', '.join(ADAPTER_METHODS)}")
        settings.check()
        if settings.kind == "prefix-tuning" and self.recompute != "none":
            raise UserError(
                f"--method prefix-tuning with --recompute {self.recompute}: the prefix is a key-value cache, which "
                "checkpointed blocks do not take",
                "Use --recompute none, or --method prompt-tuning",
            )
        if self.strategy not in _ADAPTER_STRATEGIES:
            raise CannotTell(
                f"--method {self.method} with --strategy {self.strategy} is not modelled yet: its wrappers treat frozen and "
                f"trained parameters apart. Use --strategy {' or '.join(_ADAPTER_STRATEGIES)}"
            )

    def _check_strategy(self) -> None:
        known = [part for device in OFFLOADS.values() for part in device]
        for part in self.offload:
            one_of("--offload", part, tuple(known))
        refuse(self)
        check_strategy(self)
        if self.strategy != SINGLE and self.mode != "train":
            raise CannotTell(f"--mode {self.mode} with --strategy {self.strategy} is not modelled yet. Use --mode train")

    @property
    def adapter_settings(self) -> AdapterSettings | None:
        """What is put on the model; None where its own weights train."""
        if self.adapter is not None and self.method in ZEROTH_ORDER:
            from .strategies.zo_settings import without_autocast

            return without_autocast(self.adapter)
        return self.adapter or (AdapterSettings.of(self.method) if self.method in ADAPTER_METHODS else None)

    @property
    def has_backward(self) -> bool:
        """Whether there are gradients, and an optimizer of torch's kind that steps on them."""
        return self.mode == "train" and self.method not in ZEROTH_ORDER

    @property
    def num_forwards(self) -> int:
        """Forwards of one micro batch in a step: zeroth-order training compares two."""
        return 2 if self.method in ZEROTH_ORDER else 1

    def but(self, **changes: Any) -> Request:
        """The same question with some things changed; loop facts are named with their own field names."""
        loop_fields = {k: v for k, v in changes.items() if k in LoopFacts.__dataclass_fields__}
        own = {k: v for k, v in changes.items() if k not in loop_fields}
        if own.get("strategy", self.strategy) != self.strategy and "device" not in own:
            from .strategies.outside import moved_to  # another strategy can have another number of communicators

            own["device"] = moved_to(self.device, self.gpus, self.strategy, own["strategy"])
        return replace(self, **own, loop=replace(self.loop, **loop_fields))

    def as_data(self) -> dict[str, Any]:
        """The question as JSON data, for the answer to carry; `question.request_of` is the inverse."""
        plain = {
            k: v for k, v in asdict(replace(self, loop=self.loop)).items() if k not in ("model", "device", "defaults", "loop")
        }
        return {
            "model": self.model.name,
            "reference": self.model.reference,
            "overrides": dict(self.model.overrides),
            "task": self.model.task,
            "gpu": self.device.key,
            "gpu_total_bytes": self.device.total_bytes,
            **plain,
            "frozen": list(self.frozen),
            "loop": asdict(self.loop),
        }


def one_of(option: str, value: str, known: tuple[str, ...], later: tuple[str, ...] = ()) -> None:
    if value in known:
        return
    if value in later:
        raise CannotTell(f"{option} {value} is not modelled yet. Known so far: {', '.join(known)}")
    hint = did_you_mean(value, (*known, *later))
    raise UserError(f"{option} {value!r} is not known", f"{hint} Choose one of {', '.join(known)}".strip())
