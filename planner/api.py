"""The planner from Python: `memplan.fits` and `memplan.trace`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from ..units import parse_bytes
from .loop import LoopFacts
from .optimizers.methods import METHODS as OPTIMIZER_METHODS
from .optimizers.methods import default_optimizer, method_of, optimizer_under
from .request import ALIASES, DEFAULT_MICRO_BATCH_SIZE, DEFAULT_SEQ_LEN, Request
from .strategies import DISTRIBUTED, SINGLE
from .strategies.outside import with_nccl

if TYPE_CHECKING:
    from ..hardware.profile import Device
    from ..models import ModelSpec
    from ..models.adapters import AdapterSettings
    from .prediction import Prediction
    from .trace.source import TraceSource
    from .trace.steptrace import StepTrace

# By default precision, strategies whose runtimes keep fp32 masters beside it.  GPTQ's scales stay in 16 bits under FSDP.
_WITH_MASTERS = {"bf16": ("zero", "fsdp"), "fp16": ("zero",)}


def fits(
    model: str | ModelSpec | Callable[[], Any],
    gpu: str = "auto",
    *,
    advice: bool = True,
    traces: TraceSource | None = None,
    **options: Any,
) -> Prediction:
    """Whether one training step of `model` fits on `gpu`.

    **Main arguments.**  `model`: a reference (catalogue name, hub id, folder, "file.py:factory") or a ModelSpec.
    `gpu`: a key of `memplan hardware list`, or "auto" for this machine's.  `micro_batch_size`, `seq_len`, `precision`,
    `optimizer`, `recompute`: as on the command line.

    **Other arguments.**  Every field of `Request` and `LoopFacts`; `task`, `overrides`, `gpu_memory` (text or bytes).
    `advice=False` leaves out maxima and remedies.

    **Returns** a Prediction; a question that memplan cannot answer has verdict `unknown`.

    **Raises** UserError for input that cannot be used.
    """
    from .advice import advise
    from .predict import predict
    from .recompute.choice import chosen
    from .trace.source import TraceSource

    source = traces or TraceSource()
    request = chosen(make_request(model, gpu, **options), source)
    prediction = predict(request, source)
    return advise(prediction, request, source) if advice else prediction


def trace(model: str | ModelSpec, *, target: str = "cuda", gpu: str = "a100-80gb", **options: Any) -> StepTrace:
    """One recorded micro step of `model`, as a StepTrace with its `torch.fx` graph; arguments as for `fits`."""
    from .trace.source import trace_options
    from .trace.tracer import trace_step

    request = make_request(model, gpu, **options)
    request.check()
    return trace_step(request.model, trace_options(request, target))


def make_request(
    model: str | ModelSpec | Callable[[], Any],
    gpu: str,
    *,
    task: str | None = None,
    overrides: Mapping[str, str] | None = None,
    gpu_memory: str | int | None = None,
    trust_remote_code: bool = False,
    **options: Any,
) -> Request:
    """A checked Request from what a person types.  Raises UserError with the option's name."""
    from ..hardware.catalogue import resolve
    from ..models import ModelSpec, load

    if isinstance(model, str):
        spec = load(model, task=task, overrides=overrides, trust_remote_code=trust_remote_code)
    elif isinstance(model, ModelSpec):
        spec = model
    else:
        raise UserError(f"model: expected a reference or a ModelSpec, got a {type(model).__name__}", "Pass 'file.py:factory'")
    memory = parse_bytes(gpu_memory, "--gpu-memory") if isinstance(gpu_memory, str) else gpu_memory
    device, note = resolve(gpu, memory_bytes=memory)
    loop_facts = {k: options.pop(k) for k in list(options) if k in LoopFacts.__dataclass_fields__}
    unknown = [k for k in options if k not in Request.__dataclass_fields__]
    if unknown:
        raise UserError(f"{unknown[0]}: not an option", f"Options: {', '.join(Request.__dataclass_fields__)}")
    options = {k: v for k, v in options.items() if v is not None}
    for name, spellings in ALIASES.items():
        if name in options:
            options[name] = spellings.get(options[name], options[name])
    defaults = [note] if note else []
    _name_the_optimizer(options)
    if "micro_batch_size" not in options:
        defaults.append(f"micro batch size {DEFAULT_MICRO_BATCH_SIZE} (not given)")
    if "seq_len" not in options:
        options["seq_len"] = min(DEFAULT_SEQ_LEN, spec.max_seq_len or DEFAULT_SEQ_LEN)
        if spec.task not in ("image-classification",):
            defaults.append(f"sequence length {options['seq_len']} (not given)")
    if options.get("method") == "zo2" and options.get("gpus", 1) > 1:
        defaults.append(
            f"ZO2 runs on one GPU: {options['gpus'] - 1} of the {options['gpus']} stay idle. --method distzo2 uses them"
        )
        options["gpus"] = options["nodes"] = 1
    if options.get("strategy") in DISTRIBUTED and "gpus" not in options:
        raise UserError(f"--strategy {options['strategy']}: expected a number of GPUs", "Say how many with --gpus N")
    device = with_nccl(device, options.get("gpus", 1), options.get("strategy", SINGLE))
    if options.get("precision") is None:
        options["precision"], reason = _default_precision(spec, device, options.get("adapter"))
        if str(options.get("strategy", "")).startswith(_WITH_MASTERS.get(options["precision"], ())):
            options["precision"], reason = f"{options['precision']}-mixed", reason + ", with fp32 masters"
        defaults.append(f"precision {options['precision']} (not given: {reason})")
    return Request(model=spec, device=device, loop=LoopFacts(**loop_facts), defaults=tuple(defaults), **options)


def _name_the_optimizer(options: dict[str, Any]) -> None:
    """A method that an optimizer is, by either of its names; what steps inside backward only releases gradients."""
    method, optimizer = options.get("method"), options.get("optimizer")
    if method is None and optimizer is not None and (own := method_of(optimizer)):
        method = options["method"] = own
    if method in OPTIMIZER_METHODS:
        options["optimizer"] = optimizer_under(method, optimizer) if optimizer else default_optimizer(method)
        if method == "lomo":
            options.setdefault("strategy", "release")


def _default_precision(spec: ModelSpec, device: Device, adapter: AdapterSettings | None) -> tuple[str, str]:
    """(precision, why): that of the stored weights, as `from_pretrained` loads them, where it can train."""
    if adapter is not None and adapter.base_quant == "gptq":
        return "fp16", "GPTQ's products are of fp16"
    if spec.stored_dtype not in ("bfloat16", "float16"):
        return "fp32", "as the weights are stored"
    if device.compute_capability is not None and device.compute_capability < (8, 0):
        return "fp32", f"the weights are stored in 16 bits, but {device.name} has no bf16"
    if spec.stored_dtype == "float16":
        return "bf16", "the weights are stored in 16 bits, and pure fp16 does not train well"
    return "bf16", "as the weights are stored"
