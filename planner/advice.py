"""What else would fit: the largest batch and length when it fits, the cheapest changes that make it fit when it does not."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..errors import CannotTell, UserError
from . import cache
from .allocator.config import AllocConf
from .predict import ledger_of, predict, replay_ledger
from .prediction import Prediction, Remedy, Verdict

if TYPE_CHECKING:
    from .request import Request
    from .trace.source import TraceSource

_MAX_BATCH = 1 << 14
_LONG = 1 << 15  # positions of a model from which on lengths are searched in longer steps
_MIN_STEPS = 2  # lengths are searched from here on: shorter ones are traced one by one (family.py), and nobody trains on them
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
        batch, longest = _largest(prediction, request, traces)
        return replace(prediction, max_micro_batch_size=batch, max_seq_len=longest)
    if prediction.host.missing_bytes:  # nothing that changes the GPU's memory helps the host's
        without = _Change("keep everything on the GPU", "without --offload", request.but(offload=(), deepspeed=None))
        remedy = _try(without, traces) if request.offload else None
        return replace(prediction, remedies=(remedy,) if remedy is not None else ())
    return replace(prediction, remedies=tuple(remedies(request, traces, prediction)))


def _largest(prediction: Prediction, request: Request, traces: TraceSource) -> tuple[int | None, int | None]:
    """(largest micro batch, longest sequence), each found by a dozen simulations; they are kept on disk."""
    spec = request.model
    name = None
    if spec.factory is None and not spec.trust_remote_code:  # else code that is not ours decides, too
        name = cache.answer_key("largest", repr(request))
        with contextlib.suppress(ValueError, TypeError):  # it is not there, or it was written by a broken program
            batch, longest = json.loads(cache.get(name) or b"")
            return batch, longest
    batches = _batches(request, traces, prediction)
    longest = max_seq_len(request, traces, near=batches)
    if name is not None:
        cache.put(name, json.dumps([batches.good, longest]).encode())
    return batches.good, longest


def max_micro_batch_size(request: Request, traces: TraceSource) -> int | None:
    """The largest micro batch that fits, everything else as asked; None when not even one sample does."""
    return _batches(request, traces).good


def _batches(request: Request, traces: TraceSource, answered: Prediction | None = None) -> _Boundary:
    """The search for the largest micro batch.  `answered`: the answer to the request, where there is one."""
    search = _Boundary(1, _MAX_BATCH)
    if answered is not None and request.micro_batch_size <= _MAX_BATCH:
        live = answered.allocated_peak_bytes / request.device.usable_bytes
        search.learn(request.micro_batch_size, answered.fits, live)
    search.run(lambda n: _fits(request.but(micro_batch_size=n), traces), request.micro_batch_size)
    return search


def seq_step(limit: int) -> int:
    """Lengths are searched in steps of so many tokens, in a model that takes `limit`."""
    return 16 if limit <= _LONG else 64


def max_seq_len(request: Request, traces: TraceSource, near: _Boundary | None = None) -> int | None:
    """The longest sequence that fits, in steps of `seq_step` and up to the model's own limit; None where length means nothing.

    `near`: the search for the largest batch of the same request, which knows how it fits as it is.
    """
    if request.model.task == "image-classification":
        return None
    limit = request.model.max_seq_len or 1 << 17
    step = seq_step(limit)
    if limit < _MIN_STEPS * step:
        return None
    steps, rest = divmod(limit, step)
    search = _Boundary(_MIN_STEPS, steps)
    start = request.seq_len // step
    if near is not None:
        search.aim = near.limit
        if start * step == request.seq_len and _MIN_STEPS <= start <= steps:
            search.learn(start, *near.known[request.micro_batch_size])
            search.hint = start * (near.good or 0) // request.micro_batch_size  # as many tokens as in the largest batch
    found = search.run(lambda n: _fits(request.but(seq_len=n * step), traces), start)
    if found is None:
        return None
    if found == steps and rest and _fits(request.but(seq_len=limit), traces)[0]:
        return limit
    return found * step


def largest(answer: Callable[[int], tuple[bool, float]], low: int, high: int, start: int) -> int | None:
    """The largest n in [low, high] that fits, if fitting is monotone.  `answer(n)`: (fits, share of the memory that is live).

    What is returned has been tried, and so has the next larger one, which does not fit.
    """
    return _Boundary(low, high).run(answer, start)


class _Boundary:
    """Where fitting ends, between the largest n that fits and the smallest that does not.

    The peak of live bytes is the highest of several moments, and each of them grows linearly in n: the curve is convex, and the
    chord of two points lies above it.  So where the chord of a point that fits and one that does not crosses the whole memory,
    it fits as far as live bytes say; what fragmentation costs beyond that is found in doubling steps.
    """

    _GROWTH = 8  # the most by which n grows at once: two points below a bend say nothing of what lies beyond it
    _FEW = 12  # tries, after which it bisects: a boundary that is not where the lines say

    def __init__(self, low: int, high: int) -> None:
        self.low, self.high = low, high
        self.good: int | None = None
        self.bad = high + 1
        self.known: dict[int, tuple[bool, float]] = {}
        self.hint = 0  # a guess of the boundary, from elsewhere; it is tried before any line can be drawn
        self.aim = 1.0  # the live share at which it is thought to end; less than 1 for what fragmentation takes
        self._step = 0  # down from a point that does not fit although less than the memory is live

    def run(self, answer: Callable[[int], tuple[bool, float]], start: int) -> int | None:
        """Tries until the boundary is found; returns `good`."""
        n = min(max(start, self.low), self.high)
        if self.known:
            n = self._next()
        while not self._is_found():
            self.learn(n, *answer(n))
            n = self._next()
        return self.good

    def learn(self, n: int, fits: bool, live: float) -> None:
        self.known[n] = fits, live
        if fits:
            self.good, self._step = n, 0
        else:
            self.bad = n
            if live <= 1:
                self.aim = min(self.aim, live)

    @property
    def limit(self) -> float:
        """The live share at which it ended, about."""
        if self.good is None or self.bad not in self.known:
            return 1.0
        return min((self.known[self.good][1] + self.known[self.bad][1]) / 2, 1.0)

    def _is_found(self) -> bool:
        return self.good == self.high or self.bad == self.low or (self.good is not None and self.bad - self.good <= 1)

    def _next(self) -> int:
        """The next n to try, between the two."""
        low = self.low if self.good is None else self.good + 1
        return min(max(self._guess(), low), self.bad - 1)

    def _guess(self) -> int:
        good, bad, known = self.good, self.bad, self.known
        if good is None:
            crossing = self._crossing(*sorted(known)[:2]) if len(known) > 1 else None
            return min(bad // 2, int(bad / max(known[bad][1], 1.01))) if crossing is None else crossing
        if bad not in known:  # nothing fails yet
            below = max((n for n in known if n < good), default=None)
            crossing = None if below is None else self._crossing(below, good)
            if below is None:
                return max(self.hint, 2 * good)
            return min(self.high if crossing is None else crossing, self._GROWTH * good)
        middle = (good + bad) // 2
        if len(known) > self._FEW:
            return middle
        if known[bad][1] > 1:
            crossing = self._crossing(good, bad)
            return middle if crossing is None else crossing
        self._step = 2 * self._step or max(1, bad // 128)
        return max(bad - self._step, middle)

    def _crossing(self, n1: int, n2: int) -> int | None:
        """The last n at which the line through two points is within what it aims at; None where it never leaves it."""
        live1, live2 = self.known[n1][1], self.known[n2][1]
        return int(n1 + (self.aim - live1) * (n2 - n1) / (live2 - live1)) if live2 > live1 else None


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
    return played.failure is None, share


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
