"""What else would fit: the largest batch and length when it fits, the cheapest changes that make it fit when it does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..errors import CannotTell, UserError
from .allocator.config import AllocConf
from .predict import ledger_of, predict, replay_ledger
from .prediction import Prediction, Remedy, Verdict

if TYPE_CHECKING:
    from .request import Request
    from .trace.source import TraceSource

_MAX_BATCH = 1 << 14
_SEQ_STEP = 16  # lengths are searched in these steps, as people choose them ...
_MIN_STEPS = 2  # ... from here on: shorter ones are traced one by one (family.py), and nobody trains on them
_MAX_REMEDIES = 6
_USUAL_CARDS = (
    "t4", "rtx-4090", "rtx-5090", "l40s", "a100-sxm-40gb", "rtx-pro-6000-blackwell", "a100-sxm-80gb", "h200-sxm-141gb", "b200",
    "b300",
)  # fmt: skip  # one of each memory size, as people rent them


def advise(prediction: Prediction, request: Request, traces: TraceSource) -> Prediction:
    """`prediction` with maxima (when it fits) or remedies (when it does not).  `unknown` stays as it is."""
    if prediction.verdict is Verdict.UNKNOWN:
        return prediction
    if prediction.fits:
        return replace(
            prediction,
            max_micro_batch_size=max_micro_batch_size(request, traces),
            max_seq_len=max_seq_len(request, traces),
        )
    if prediction.host.missing_bytes:  # nothing that changes the GPU's memory helps the host's
        without = _Change("keep everything on the GPU", "without --offload", request.but(offload=(), deepspeed=None))
        remedy = _try(without, traces) if request.offload else None
        return replace(prediction, remedies=(remedy,) if remedy is not None else ())
    return replace(prediction, remedies=tuple(remedies(request, traces, prediction)))


def max_micro_batch_size(request: Request, traces: TraceSource) -> int | None:
    """The largest micro batch that fits, everything else as asked; None when not even one sample does."""
    return _largest(lambda n: request.but(micro_batch_size=n), 1, _MAX_BATCH, request.micro_batch_size, traces)


def max_seq_len(request: Request, traces: TraceSource) -> int | None:
    """The longest sequence that fits, in steps of 16 and up to the model's own limit; None where length means nothing."""
    if request.model.task == "image-classification":
        return None
    limit = request.model.max_seq_len or 1 << 17
    if limit < _MIN_STEPS * _SEQ_STEP:
        return None

    def at(n: int) -> Request:
        return request.but(seq_len=n * _SEQ_STEP)

    found = _largest(at, _MIN_STEPS, limit // _SEQ_STEP, request.seq_len // _SEQ_STEP, traces)
    if found is None:
        return None
    if found == limit // _SEQ_STEP and limit % _SEQ_STEP and _fits(request.but(seq_len=limit), traces)[0]:
        return limit
    return found * _SEQ_STEP


def _largest(at: Callable[[int], Request], low: int, high: int, start: int, traces: TraceSource) -> int | None:
    """The largest n in [low, high] for which `at(n)` fits."""
    return largest(lambda n: _fits(at(n), traces), low, high, start)


def largest(answer: Callable[[int], tuple[bool, float]], low: int, high: int, start: int) -> int | None:
    """The largest n in [low, high] that fits, if fitting is monotone.  `answer(n)`: (fits, share of the memory that is used).

    Live bytes grow almost linearly in n, so the boundary is guessed from the two points nearest to it.
    """
    known: dict[int, tuple[bool, float]] = {}

    def fits(n: int) -> bool:
        if n not in known:
            known[n] = answer(n)
        return known[n][0]

    good: int | None = None
    bad = high + 1
    n = min(max(start, low), high)
    while True:
        if fits(n):
            good = n
        else:
            bad = n
        if good == high or bad == low or (good is not None and bad - good <= 1):
            return good
        n = _guess(known, low if good is None else good + 1, bad - 1, grows=good is not None and bad == high + 1)


def _guess(known: dict[int, tuple[bool, float]], low: int, high: int, grows: bool) -> int:
    """The next point to try in [low, high]: where the line through the known points nearest to the boundary crosses 1."""
    if len(known) == 1:
        ((n, (_, load)),) = known.items()
        return min(max(2 * n if grows else max(1, int(n / max(load, 1.01))), low), high)
    (n1, load1), (n2, load2) = sorted(((n, load) for n, (_, load) in known.items()), key=lambda p: abs(p[1] - 1))[:2]
    if load1 == load2:
        return (low + high) // 2
    cross = n1 + (1 - load1) * (n2 - n1) / (load2 - load1)
    guess = min(max(int(cross), low), high)
    tried = len(known)
    return guess if tried < 8 else (low + high) // 2  # a boundary that is not where the line says: bisect


def _fits(request: Request, traces: TraceSource) -> tuple[bool, float]:
    """(fits, share of the usable memory that is live at the peak)."""
    usable = request.device.usable_bytes
    try:
        ledger = ledger_of(request, traces.step(request))
    except (CannotTell, UserError):
        return False, 2.0
    share = ledger.peak_bytes() / usable
    if share > 1:
        return False, share
    played = replay_ledger(ledger, AllocConf.parse(request.alloc_conf), limit_bytes=usable, with_series=False)
    return played.failure is None, max(share, played.peak_reserved_bytes / usable) if played.failure is None else max(
        share, 1.001
    )


# -- remedies ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Change:
    words: str
    option: str
    request: Request


def remedies(request: Request, traces: TraceSource, prediction: Prediction) -> list[Remedy]:
    """Single changes that make it fit, cheapest first; where none does, the pair or triple that does, else the closest ones."""
    found: list[Remedy] = []
    near: list[tuple[Remedy, _Change]] = []
    step = prediction.phases.get("step")
    step_alone = step is not None and step.requested_bytes > request.device.usable_bytes  # activations are not the matter
    for change in _changes(request):
        if step_alone and change.option.startswith("--recompute"):
            continue
        if _floor_bytes(change.request, prediction) > request.device.usable_bytes:
            continue
        remedy = _try(change, traces)
        if remedy is None:
            continue
        if remedy.verdict in (Verdict.FITS, Verdict.TIGHT):
            found.append(remedy)
        else:
            near.append((remedy, change))
        if len(found) == _MAX_REMEDIES:
            break
    if not step_alone:
        found = _smaller(request, traces) + found
    if not found:
        found = _combined(request, traces, prediction)
    found = found[: _MAX_REMEDIES - 1] + _larger_card(request, traces, prediction)
    if not found:
        near.sort(key=lambda pair: pair[0].reserved_peak_bytes)
        found = [remedy for remedy, _ in near[:3]]
    return found[:_MAX_REMEDIES]


# A lower bound on an optimizer's state, in copies of the parameters; 0 where it depends on shapes.  (torch/optim: exp_avg and
# exp_avg_sq, the sum of squares, one momentum.)
_STATE_COPIES = {"adamw": 2, "adam": 2, "adagrad": 1, "sgd-momentum": 1, "rmsprop": 1, "nadam": 2, "radam": 2}


def _floor_bytes(request: Request, prediction: Prediction) -> int:
    """What the run needs at least: parameters, and gradients and optimizer state when it trains."""
    from .trace.options import PARAM_DTYPE
    from .trace.steptrace import ITEMSIZE

    if request.gpus > 1:
        return 0  # the strategy decides what lies on each card
    size = ITEMSIZE[PARAM_DTYPE[request.precision]]
    if request.method in ("zo2", "distzo2"):
        return 0  # the blocks are on the host
    if not request.has_backward:
        return prediction.num_params * size
    return (prediction.num_params + prediction.num_trainable_params * (1 + _STATE_COPIES.get(request.optimizer, 0))) * size


def _changes(request: Request) -> Iterator[_Change]:
    """Single changes, cheapest first: those that cost nothing, then time, then precision of the numbers, then the optimizer."""
    trains = request.has_backward
    if trains and not request.loop.set_to_none:
        yield _Change("let zero_grad set gradients to None", "without --keep-grads", request.but(set_to_none=True))
    if trains and request.loop.zero_grad != "after-step":
        yield _Change("clear gradients right after the step", "--zero-grad after-step", request.but(zero_grad="after-step"))
    if request.loop.keep_outputs:
        yield _Change("keep only the loss of the model's output", "without --keep-outputs", request.but(keep_outputs=False))
    if request.use_cache:
        yield _Change("switch off the key-value cache in training", "without --use-cache", request.but(use_cache=False))
    if trains and request.optimizer_impl in ("default", "foreach") and request.optimizer in ("adamw", "adam", "adagrad"):
        yield _Change(
            "use the fused optimizer kernel: no temporary copy in the step",
            "--optimizer-impl fused",
            request.but(optimizer_impl="fused"),
        )
    if not request.alloc_conf:
        yield _Change(
            "let segments grow, against fragmentation",
            "--alloc-conf expandable_segments:True",
            request.but(alloc_conf="expandable_segments:True"),
        )
    if request.attention == "eager":
        yield _Change("use fused attention (SDPA)", "--attention sdpa", request.but(attention="sdpa"))
    if trains and request.recompute == "none":
        yield _Change(
            "recompute activations in backward (about a third more compute)", "--recompute full", request.but(recompute="full")
        )
    if trains and request.precision == "fp32" and request.strategy in ("single", "ddp"):
        yield _Change(
            "compute in bf16, keep fp32 weights (autocast)", "--precision bf16-autocast", request.but(precision="bf16-autocast")
        )
    if request.precision in ("fp32", "bf16-autocast") and request.strategy in ("single", "ddp"):
        yield _Change(
            "weights, gradients and state in bf16, without fp32 masters", "--precision bf16", request.but(precision="bf16")
        )
    if request.precision == "fp16-autocast":
        yield _Change(
            "weights, gradients and state in fp16, without fp32 masters", "--precision fp16", request.but(precision="fp16")
        )
    if request.method == "mezo":
        yield _Change(
            "keep the blocks on the host (ZO2: the same training, more copies)", "--method zo2", request.but(method="zo2")
        )
    if trains and request.optimizer in ("adamw", "adam"):
        reset = "" if request.optimizer_impl == "default" else " --optimizer-impl default"
        for words, name in (("an optimizer with factored state", "adafactor"), ("an optimizer without state", "sgd")):
            changed = request.but(optimizer=name, optimizer_impl="default")
            yield _Change(words, f"--optimizer {name}{reset}", changed)


def _try(change: _Change, traces: TraceSource) -> Remedy | None:
    try:
        prediction = predict(change.request, traces)
    except (CannotTell, UserError):
        return None
    if prediction.verdict is Verdict.UNKNOWN:
        return None
    return _remedy(change, prediction)


def _remedy(change: _Change, prediction: Prediction) -> Remedy:
    return Remedy(
        change=change.words,
        option=change.option,
        reserved_peak_bytes=prediction.reserved_peak_bytes,
        verdict=prediction.verdict,
    )


def _smaller(request: Request, traces: TraceSource) -> list[Remedy]:
    """A smaller micro batch (with accumulation, so that the optimizer sees the same batch), and a shorter sequence."""
    found = []
    accumulating = request.but(grad_accum_steps=max(2, request.loop.grad_accum_steps)) if request.has_backward else request
    batch = max_micro_batch_size(accumulating, traces) if request.micro_batch_size > 1 else None
    if batch and batch < request.micro_batch_size:
        steps = -(-request.micro_batch_size // batch) * request.loop.grad_accum_steps
        changed = request.but(micro_batch_size=batch, grad_accum_steps=steps if request.has_backward else 1)
        accumulate = f" --grad-accum {steps}" if request.has_backward else ""
        remedy = _try(_Change(f"a micro batch of {batch}", f"--micro-batch {batch}{accumulate}", changed), traces)
        if remedy and remedy.verdict in (Verdict.FITS, Verdict.TIGHT):
            found.append(remedy)
    length = max_seq_len(request, traces)
    if length and length < request.seq_len:
        remedy = _try(_Change(f"sequences of {length} tokens", f"--seq {length}", request.but(seq_len=length)), traces)
        if remedy and remedy.verdict in (Verdict.FITS, Verdict.TIGHT):
            found.append(remedy)
    return found


def _larger_card(request: Request, traces: TraceSource, prediction: Prediction) -> list[Remedy]:
    """The smallest of the usual cards on which it fits as it is."""
    from ..hardware.catalogue import device

    if request.gpus > 1:
        return []
    cards = sorted(map(device, _USUAL_CARDS), key=lambda d: d.usable_bytes)
    for card in cards:
        if card.usable_bytes < prediction.reserved_peak_bytes:
            continue
        words = f"a card with more memory, as it is: {card.name}"
        remedy = _try(_Change(words, f"--gpu {card.key}", request.but(device=card)), traces)
        if remedy and remedy.verdict is Verdict.FITS:
            return [remedy]
    return []


def _combined(request: Request, traces: TraceSource, prediction: Prediction) -> list[Remedy]:
    """Changes added one by one, cheapest first, until it fits."""
    words: list[str] = []
    options: list[str] = []
    current = request
    for _ in range(8):
        change = next(
            (c for c in _changes(current) if c.option not in options and not c.option.startswith("--alloc-conf")), None
        )
        if change is None:
            return []
        current = change.request
        family = change.option.split()[0]
        replaced = {family, "--optimizer-impl"} if family == "--optimizer" else {family}
        kept = [(w, o) for w, o in zip(words, options, strict=True) if o.split()[0] not in replaced]
        words, options = [w for w, _ in kept] + [change.words], [o for _, o in kept] + [change.option]
        if _floor_bytes(current, prediction) > request.device.usable_bytes:
            continue
        remedy = _try(_Change("; ".join(words), " ".join(options), current), traces)
        if remedy and remedy.verdict in (Verdict.FITS, Verdict.TIGHT):
            return [remedy]
    return []
