"""Inverse questions: the largest micro batch, the longest samples, or the fewest GPUs with which a run fits.

Each is found from real answers, and what is given out is proved: the figure itself fits, and the next one does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import CannotTell, UserError
from .advice import largest, seq_step
from .predict import predict
from .prediction import Prediction, Verdict
from .strategies import SINGLE

if TYPE_CHECKING:
    from ..models import ModelSpec
    from .request import Request
    from .trace.source import TraceSource

MAX_BATCH = 1 << 14
_MIN_STEPS = 2  # shorter samples are traced one by one, and nobody trains on them
_NO_LIMIT = 1 << 17  # tokens, for a model that has no longest length
_OF_A_MACHINE = 8  # GPUs, as they are sold
_MOST_MACHINES = 512
_ALIKE = 0.01  # of the peak: what more GPUs must save at least to be worth trying


@dataclass(frozen=True, kw_only=True)
class Inverse:
    """The figure that was asked for, and the two answers that prove it."""

    asked: str
    """max_batch | max_seq | min_gpus."""
    value: int | None
    """None: nothing fits."""
    prediction: Prediction | None
    """The answer at `value`."""
    next_value: int | None
    """The next larger batch or length, or smaller number of GPUs; None where there is none."""
    next_prediction: Prediction | None
    """The answer there: it does not fit."""
    why: str
    """Why it is no better, in one sentence."""
    num_answers: int
    """Questions that were answered on the way."""
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return in_words(self)

    def to_json(self) -> dict[str, Any]:
        """Plain data with stable keys."""
        return {
            "asked": self.asked,
            "value": self.value,
            "next_value": self.next_value,
            "why": self.why,
            "num_answers": self.num_answers,
            "notes": list(self.notes),
            "prediction": self.prediction and self.prediction.to_json(),
            "next_prediction": self.next_prediction and self.next_prediction.to_json(),
        }


def max_batch(model: str | ModelSpec, gpu: str = "auto", *, strict: bool = False, **options: Any) -> Inverse:
    """The largest micro batch that fits, everything else as asked.

    Arguments as for `memplan.fits`.  `strict`: a tight fit is none.  Raises UserError for input that cannot be used, CannotTell
    where there is no answer at all.
    """
    return largest_batch(_request(model, gpu, options), _source(), strict=strict)


def max_seq(model: str | ModelSpec, gpu: str = "auto", *, strict: bool = False, **options: Any) -> Inverse:
    """The longest samples that fit, in steps of 16 or 64 tokens up to the model's own limit; arguments as for `max_batch`."""
    return longest(_request(model, gpu, options), _source(), strict=strict)


def min_gpus(model: str | ModelSpec, gpu: str = "auto", *, strict: bool = False, **options: Any) -> Inverse:
    """The fewest GPUs with which it fits: 1 to 8 of one machine, then whole machines of 8; arguments as for `max_batch`.

    Without a strategy that shares the model out, `fsdp2` is asked about.
    """
    notes = sharing(options)

    def at(gpus: int, nodes: int) -> Request:
        return _request(model, gpu, {**options, "gpus": gpus, "nodes": nodes})

    return fewest(at, _source(), strict=strict, notes=notes)


def sharing(options: dict[str, Any]) -> tuple[str, ...]:
    """Sets a strategy of several GPUs in `options` where there is none, and says so."""
    if options.get("strategy") not in (None, SINGLE):
        return ()
    options["strategy"] = "fsdp2"
    return ("--strategy fsdp2 (not given): the model is shared out over the GPUs",)


def _request(model: str | ModelSpec, gpu: str, options: dict[str, Any]) -> Request:
    from .api import make_request

    return make_request(model, gpu, **options)


def _source() -> TraceSource:
    from .trace.source import TraceSource

    return TraceSource()


def largest_batch(request: Request, traces: TraceSource, *, strict: bool = False) -> Inverse:
    """The answer of `--max-batch`."""
    asked = _Answers(lambda n: request.but(micro_batch_size=n), traces, strict)
    found = largest(asked.fits, 1, MAX_BATCH, request.micro_batch_size)
    after = 1 if found is None else None if found == MAX_BATCH else found + 1
    return asked.result("max_batch", found, after, f"{MAX_BATCH:,} samples are the most that are tried")


def longest(request: Request, traces: TraceSource, *, strict: bool = False) -> Inverse:
    """The answer of `--max-seq`."""
    if request.model.task == "image-classification":
        raise UserError(f"--max-seq: {request.model.name} reads pictures, not tokens", "Ask for --max-batch")
    own = request.model.max_seq_len
    limit = own or _NO_LIMIT
    step = seq_step(limit)
    if limit < _MIN_STEPS * step:
        raise UserError(f"--max-seq: {request.model.name} takes {limit} tokens at most", "Ask for --max-batch")
    lengths = [n * step for n in range(_MIN_STEPS, limit // step + 1)]
    if lengths[-1] != limit:
        lengths.append(limit)
    asked = _Answers(lambda n: request.but(seq_len=n), traces, strict)
    start = min(range(len(lengths)), key=lambda i: abs(lengths[i] - request.seq_len))
    found = largest(lambda i: asked.fits(lengths[i]), 0, len(lengths) - 1, start)
    words = f"{limit:,} tokens are the model's own limit" if own else f"{limit:,} tokens are the most that are tried"
    at = None if found is None else lengths[found]
    after = None if found is None or found + 1 == len(lengths) else lengths[found + 1]
    return asked.result("max_seq", at, lengths[0] if found is None else after, words)


def fewest(
    at: Callable[[int, int], Request], traces: TraceSource, *, strict: bool = False, notes: tuple[str, ...] = ()
) -> Inverse:
    """The answer of `--min-gpus`; `at(gpus, nodes)` asks."""
    counts = [*range(1, _OF_A_MACHINE + 1), *(_OF_A_MACHINE * n for n in range(2, _MOST_MACHINES + 1))]
    asked = _Answers(lambda n: at(n, -(-n // _OF_A_MACHINE)), traces, strict)
    low, high = _bracket(asked, counts)
    if high is None:
        return asked.result("min_gpus", None, max(asked.known), "", notes)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if asked.fits(counts[middle])[0] else (middle, high)
    return asked.result("min_gpus", counts[high], counts[high - 1] if high else None, "one GPU is the fewest there is", notes)


def _bracket(asked: _Answers, counts: Sequence[int]) -> tuple[int, int | None]:
    """Indices of the last of 1, 2, 4, 8, 16 ... GPUs that does not fit (-1: none) and of the first that does.

    None for the second where none does, or where more GPUs save nothing.
    """
    low, before = -1, None
    for n in (n for n in counts if n & (n - 1) == 0):
        if asked.fits(n)[0]:
            return low, counts.index(n)
        low, now = counts.index(n), asked.known[n]
        if n > _OF_A_MACHINE and not _saves(before, now):
            return low, None
        before = now
    return low, None


def _saves(before: Prediction | None, now: Prediction | None) -> bool:
    """Whether twice the GPUs made each need less; so it may be where there is no answer."""
    if before is None or now is None:
        return True
    return before.allocated_peak_bytes - now.allocated_peak_bytes >= _ALIKE * before.allocated_peak_bytes


class _Answers:
    """Answers by the figure that is varied; each is asked for once.

    `known[n]` is None where a figure has no answer (a strategy that refuses that number of GPUs, a length that cannot be
    traced): it counts as one that does not fit.
    """

    def __init__(self, at: Callable[[int], Request], traces: TraceSource, strict: bool) -> None:
        self._at, self._traces, self._strict = at, traces, strict
        self.known: dict[int, Prediction | None] = {}
        self._reasons: dict[int, str] = {}

    def good(self, prediction: Prediction | None) -> bool:
        return prediction is not None and prediction.verdict.exit_code(self._strict) == 0

    def at(self, n: int) -> Prediction | None:
        if n not in self.known:
            try:
                found = predict(self._at(n), self._traces)
            except (CannotTell, UserError) as error:
                self.known[n], self._reasons[n] = None, str(error)
                return None
            unknown = found.verdict is Verdict.UNKNOWN
            self.known[n], self._reasons[n] = (None if unknown else found), found.reason
        return self.known[n]

    def fits(self, n: int) -> tuple[bool, float]:
        """(fits, share of the usable memory that is live at the peak)."""
        found = self.at(n)
        if found is None:
            return False, 2.0
        return self.good(found), found.allocated_peak_bytes / max(found.usable_bytes, 1)

    def result(self, asked: str, value: int | None, after: int | None, limit: str, notes: tuple[str, ...] = ()) -> Inverse:
        """The Inverse.  Raises CannotTell where no figure that was tried has an answer."""
        prediction = None if value is None else self.at(value)
        following = None if after is None else self.at(after)
        if not any(self.known.values()):
            raise CannotTell(next(iter(self._reasons.values())))
        return Inverse(
            asked=asked,
            value=value,
            prediction=prediction,
            next_value=after,
            next_prediction=following,
            why=limit if after is None else self._why(after),
            num_answers=len(self.known),
            notes=notes,
        )

    def _why(self, n: int) -> str:
        found = self.known[n]
        if found is not None and found.verdict is Verdict.TIGHT:
            return f"{found.reason}: a tight fit, which --strict does not take"
        return self._reasons[n]


# -- in words --------------------------------------------------------------------------------------------------------------

_FIGURES = {
    "max_batch": "largest micro batch",
    "max_seq": "longest sample in tokens",
    "min_gpus": "number of GPUs that is enough",
}


def in_words(found: Inverse) -> str:
    """The figure, and the next one with what is wrong with it: two lines."""
    name = _FIGURES[found.asked]
    if found.value is None or found.prediction is None:
        first = f"NOTHING FITS: there is no {name}"
    elif found.asked == "min_gpus":
        first = f"{found.value:,} GPU{'s are' if found.value > 1 else ' is'} the fewest that fit"
    else:
        first = f"{found.value:,} is the {name} that fits"
    if found.prediction is not None and found.prediction.verdict is Verdict.TIGHT:
        first += ", and that is tight"
    if found.next_value is None:
        second = found.why
    else:
        number = f"{found.next_value:,}" + (" tokens" if found.asked == "max_seq" else "")
        if found.asked == "min_gpus":
            number = "one GPU" if found.next_value == 1 else f"{number} GPUs"
        second = f"{number} {'do' if number.endswith('s') else 'does'} not fit: {found.why}"
    return "\n".join([first, *found.notes, f"{second[:1].upper()}{second[1:]}".rstrip(".") + "."])
