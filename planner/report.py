"""A Prediction as text: the verdict first, then where every byte goes, then what to do about it."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..units import gib, human
from .error_bars import in_words
from .optimizers.methods import METHODS as OPTIMIZER_METHODS
from .prediction import Verdict
from .strategies import RELAY, ZEROTH_ORDER
from .wording import COMPONENT, LANE, PHASE, columns, count, figure, hundredths, op_name, shares

if TYPE_CHECKING:
    from .prediction import Failure, Moment, Prediction

WIDTH = 92
_HEADLINE = {Verdict.FITS: "FITS", Verdict.TIGHT: "TIGHT", Verdict.DOES_NOT_FIT: "DOES NOT FIT", Verdict.UNKNOWN: "CANNOT TELL"}
_COLOUR = {Verdict.FITS: "32", Verdict.TIGHT: "33", Verdict.DOES_NOT_FIT: "31", Verdict.UNKNOWN: "35"}  # ANSI foregrounds
_LOSS_OPS = frozenset(
    {"log_softmax", "nll_loss_forward", "nll_loss_backward", "log_softmax_backward_data", "mse_loss", "mse_loss_backward"}
)
_LABEL_WIDTH = 38
_BAR_WIDTH = 24


def render(prediction: Prediction, width: int = WIDTH, *, colour: bool = False, bar: str = "#") -> str:
    """The report, `width` columns wide at most, without a newline at its end.

    `colour` adds ANSI codes to the verdict; `bar` is the character that bars are made of.
    """
    width = max(width, 60)
    parts = [_headline(prediction, width, colour), _asked(prediction, width)]
    if prediction.verdict is not Verdict.UNKNOWN and prediction.peak is not None:
        parts.append(_table(prediction, width, bar))
        parts.append(_where(prediction, width))
        parts.append(_phases(prediction, width))
        parts.append(_host(prediction))
        parts.append(_hints(prediction, width))
        parts.append(_largest(prediction, width))
        parts.append(_remedies(prediction, width))
        parts.append(_assumptions(prediction, width))
    return "\n\n".join(part for part in parts if part)


def print_report(prediction: Prediction) -> None:
    """Prints `render` as wide as the terminal (100 columns at most), in colour on a terminal unless NO_COLOR is set."""
    terminal = sys.stdout.isatty()
    width = min(shutil.get_terminal_size((WIDTH, 24)).columns, 100) if terminal else WIDTH
    colour = terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    try:
        "█".encode(sys.stdout.encoding or "ascii")
        bar = "█"
    except (UnicodeEncodeError, LookupError):
        bar = "#"
    print(render(prediction, width, colour=colour, bar=bar), flush=True)


@dataclass(frozen=True)
class _Figures:
    """The report's figures in hundredths of a GiB, so that they sum as printed: where rounding is in the way, `free` yields."""

    allocated: int
    reserved: int
    context: int
    total: int

    @property
    def usable(self) -> int:
        return self.total - self.context

    @property
    def free(self) -> int:
        return self.usable - self.reserved

    @classmethod
    def of(cls, p: Prediction) -> _Figures:
        return cls(*map(hundredths, (p.allocated_peak_bytes, p.reserved_peak_bytes, p.context_bytes, p.total_bytes)))


def _headline(p: Prediction, width: int, colour: bool) -> str:
    word = _HEADLINE[p.verdict]
    room = _Figures.of(p).free
    if p.verdict is Verdict.UNKNOWN:
        rest = ""
    elif p.host.missing_bytes:
        rest = f": {figure(hundredths(p.host.missing_bytes))} GiB too little beside the GPU, in each machine"
    elif room < 0 and p.fits:
        rest = f": nothing to spare on {_card(p)}"
    elif room < 0:
        rest = f": {figure(-room)} GiB too much for {_card(p)}"
    elif not p.fits:
        rest = ""  # what does not fit is beside this run: the reason says it
    else:
        rest = f": {figure(room)} GiB to spare on {_card(p)}"
    if colour:
        word = f"\x1b[1;{_COLOUR[p.verdict]}m{word}\x1b[0m"
    return "\n".join([word + rest, *_wrapped(_why(p), width)])


def _why(p: Prediction) -> str:
    """The reason as a sentence of the report; "" where the headline has said it."""
    if p.verdict is Verdict.FITS:
        return ""
    if p.verdict is Verdict.TIGHT:
        if p.num_alloc_retries:
            return "It fits only because PyTorch empties its cache when nothing is left, which costs time."
        return "That is less than the prediction's own error: try it before you rely on it."
    if p.failure is None:
        return _sentence(p.reason)
    failure = p.failure
    usable = _Figures.of(p).usable
    limit = f"the {figure(usable)} GiB that PyTorch can have"
    if failure.phase in ("load", "init"):
        return f"The run stops before its first step: the model alone takes more than {limit}."
    where = _phase(failure.phase, failure.step) + _place(failure, ", at ")
    text = f"The run stops in the {where}: it asks for {human(failure.requested_bytes)} "
    text += f"when {gib(failure.allocated_bytes)} of {limit} are in use"
    if p.usable_bytes - failure.allocated_bytes < failure.requested_bytes:
        return text + "."
    return text + f"; the other {figure(usable - hundredths(failure.allocated_bytes))} GiB lie in pieces that are too small."


def _card(p: Prediction) -> str:
    return f"one {p.gpu}" if p.question.get("gpus", 1) == 1 else f"each {p.gpu}"


def _sentence(text: str) -> str:
    """A capital first and a full stop last."""
    if text.split()[0].isalpha():  # torch.compile and google-t5/t5-small are names
        text = text[:1].upper() + text[1:]
    return text if text.endswith((".", "!", "?")) else text + "."


def _asked(p: Prediction, width: int) -> str:
    q: dict[str, Any] = p.question
    loop = q.get("loop", {})
    size = f", {count(p.num_params)} parameters" if p.num_params else ""
    if p.num_trainable_params and p.num_trainable_params != p.num_params:
        size += f" of which {count(p.num_trainable_params)} train"
    kind = {"train": _training(q), "forward": "forward pass that keeps the graph",
            "inference": "inference"}.get(q["mode"], q["mode"])  # fmt: skip
    batch = f"micro batch {q['micro_batch_size']}"
    batch += f", {q['image_size']} px" if q.get("image_size") else f", sequence {q['seq_len']}" if _has_tokens(q) else ""
    how = [kind, q["precision"], batch]
    if q.get("target_len"):
        how.append(f"{q['target_len']} label tokens")
    if loop.get("grad_accum_steps", 1) > 1:
        how.append(f"{loop['grad_accum_steps']} accumulated")
    if _has_backward(q):
        recompute = {"none": "no recompute", "full": "activations recomputed in backward"}
        if q["method"] == RELAY:
            recompute["none"] = recompute["full"] = "layer by layer, blocks recomputed"
        partly = "recomputed in part" if q["recompute"].startswith("keep:") else f"recompute {q['recompute']}"
        how.append(recompute.get(q["recompute"], partly))
    if q["strategy"] == "release":
        how.append("gradients released in backward")
    elif q["strategy"] != "single":
        how.append(q["strategy"])
    lines = [("model", f"{q['model']} ({q['task']}){size}"), ("run", ", ".join(how))]
    if p.flops_per_step:
        unit = "optimizer step" if q["mode"] == "train" else "pass"
        lines.append(("work", f"{count(p.flops_per_step)} floating-point operations in one {unit}"))
    if p.time is not None:
        lines.append(("time", _time(p)))
    if p.error_bars:
        lines.append(("error", in_words(p.error_bars)))
    return "\n".join(line for name, text in lines for line in _named(name, text, width))


def _time(p: Prediction) -> str:
    assert p.time is not None
    found, many = p.time, "GPUs" if p.question.get("gpus", 1) > 1 else "GPU"
    what = "samples" if found.counts_samples else "tokens"
    error = f" (typically within {found.typical_error:.0%})" if found.typical_error else ""
    each = "step" if p.question["mode"] == "train" else "pass"
    text = f"about {_seconds(found.seconds)} a {each}, {count(found.tokens_per_s)} {what} a second{error}"
    return (
        f"{text}, bound by {LANE.get(found.bound_by, found.bound_by)} of the {many}"
        if found.bound_by == "compute"
        else (f"{text}, bound by {LANE.get(found.bound_by, found.bound_by)}")
    )


def _seconds(seconds: float) -> str:
    """1234.5 -> "20.6 min", 0.01234 -> "12 ms"."""
    if seconds >= 90:
        return f"{seconds / 60:.1f} min"
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{seconds * 1e3:.3g} ms"


def _training(question: dict[str, Any]) -> str:
    how = f"with {question['optimizer']}" if _has_backward(question) else ""
    method = "full" if question["method"] in OPTIMIZER_METHODS else question["method"]  # the optimizer says which
    return f"{method} training {how}".rstrip()


def _has_backward(question: dict[str, Any]) -> bool:
    return question["mode"] == "train" and question["method"] not in ZEROTH_ORDER


def _has_tokens(question: dict[str, Any]) -> bool:
    return bool(question["task"] != "image-classification")


def _table(p: Prediction, width: int, bar: str) -> str:
    """Components, then what the allocator and CUDA add: each block of rows sums to the line below it, also as printed."""
    peak = p.peak
    assert peak is not None
    parts = sorted(peak.components.items(), key=lambda item: -item[1])
    rounding = peak.allocated_bytes - peak.requested_bytes
    named = COMPONENT if _has_backward(p.question) else {**COMPONENT, "activation": "inputs, and results that are kept"}
    labels = [named.get(name, name) for name, _ in parts]
    sizes = [size for _, size in parts]
    if hundredths(rounding) > 0:
        labels.append("rounding up of each tensor")
        sizes.append(rounding)
    elif sizes:
        sizes[0] += rounding  # less than the table can show: the bytes go where they change no figure
    sums = _Figures.of(p)
    figures = [*shares(sizes, sums.allocated), sums.reserved - sums.allocated, sums.context]
    percents = shares([max(f, 0) for f in figures], 100)
    room = max(8, min(_BAR_WIDTH, width - _LABEL_WIDTH - 22))
    scale = max(figures) or 1

    def part(label: str, index: int) -> str:
        stripe = bar * round(room * max(figures[index], 0) / scale)
        return f"  {label:<{_LABEL_WIDTH}}{figure(figures[index]):>9}{percents[index]:>6} %  {stripe}".rstrip()

    def sum_line(label: str, value: int, num_rows: int) -> str:
        return f"= {label:<{_LABEL_WIDTH}}{figure(value):>9}{sum(percents[:num_rows]):>6} %"

    outside = "CUDA and NCCL" if p.question.get("gpus", 1) > 1 else "CUDA itself"
    lines = [f"{'Memory on the card at the peak':<{_LABEL_WIDTH + 2}}{'GiB':>9}{'share':>8}"]
    lines += [part(label, index) for index, label in enumerate(labels)]
    lines.append(sum_line("in use by tensors (allocated)", sums.allocated, len(figures) - 2))
    lines.append(part("kept by PyTorch for reuse, and holes", len(figures) - 2))
    lines.append(sum_line("held by PyTorch (reserved)", sums.reserved, len(figures) - 1))
    lines.append(part(f"{outside} (context, loaded kernels)", len(figures) - 1))
    lines.append(
        sum_line(
            f"what nvidia-smi {'will' if sums.free >= 0 else 'would have to'} show", sums.reserved + sums.context, len(figures)
        )
    )
    room_label = "headroom" if sums.free >= 0 else "missing, until the cache is emptied" if p.fits else "missing"
    lines.append(f"  {room_label:<{_LABEL_WIDTH}}{figure(sums.free):>9}")
    lines.append(f"= {'memory of the card':<{_LABEL_WIDTH}}{figure(sums.total):>9}")
    lines.append(f"  {'of which PyTorch can have (usable)':<{_LABEL_WIDTH}}{figure(sums.usable):>9}")
    return "\n".join(lines)


def _where(p: Prediction, width: int) -> str:
    assert p.peak is not None
    peak = p.peak
    phase = _phase(peak.phase, peak.step) if p.question["mode"] == "train" else PHASE.get(peak.phase, peak.phase)
    when = phase if phase.startswith("before") else f"in the {phase}"
    return "\n".join(_named("peak", f"{when}{_place(peak, ', ')}", width))


def _phase(phase: str, step: str) -> str:
    """A phase in words, with the step to which it belongs where there are several."""
    name = PHASE.get(phase, phase)
    return f"{name} of {'the ' * (step == 'first step')}{step}" if phase in ("forward", "backward", "step") else name


def _place(moment: Moment | Failure, before: str = "") -> str:
    """The module and the op, or "" where the phase says it all."""
    if moment.phase == "load":
        return before + moment.what
    if moment.phase in ("init", "step"):
        return ""
    op = op_name(moment.what)
    module = moment.fqn or ("the loss" if op in _LOSS_OPS else "")
    return before + (f"{module} ({op})" if module else f"op {op}")


def _phases(p: Prediction, width: int) -> str:
    """The peak of each phase, all in the same unit as "in use by tensors"."""
    trains = p.question["mode"] == "train"
    rows = [
        (
            PHASE.get(name, name),
            figure(hundredths(m.allocated_bytes)),
            m.step if trains and name in ("forward", "backward", "step") else "",
            _place(m),
        )
        for name, m in p.phases.items()
    ]
    lines = columns(rows, right=frozenset({1}))
    return "\n".join(["Peak of each phase (GiB in use by tensors)", *(_cut(line, width) for line in lines)]) if lines else ""


def _host(p: Prediction) -> str:
    """Host memory and disk of one machine; "" where the run needs none worth a figure."""
    host, ranks = p.host, p.question.get("gpus", 1) // p.question.get("nodes", 1)
    if not hundredths(max(host.node_bytes, host.node_nvme_bytes)):
        return ""
    one = f" of one process (there are {ranks} on a machine)" if ranks > 1 else ""
    rows = []
    if host.pinned_reserved_bytes:
        asked = f"asked for as {figure(hundredths(host.pinned_bytes))}: each block is rounded up to a power of two"
        rows.append(("pinned", figure(hundredths(host.pinned_reserved_bytes)), asked))
    if host.pageable_bytes:
        rows.append(("pageable", figure(hundredths(host.pageable_bytes)), ""))
    if host.nvme_bytes:
        rows.append(("on NVMe", figure(hundredths(host.nvme_bytes)), ""))
    if ranks > 1 or (host.pinned_reserved_bytes and host.pageable_bytes):
        most = f"NVMe {figure(hundredths(host.node_nvme_bytes))}" if host.node_nvme_bytes and ranks > 1 else ""
        rows.append(("a machine", figure(hundredths(host.node_bytes)), most or "at the moment when it holds most"))
    return "\n".join([f"Host memory{one}, beside Python itself (GiB)", *columns(rows, right=frozenset({1}))])


def _hints(p: Prediction, width: int) -> str:
    said = [line for hint in p.hints for line in _wrapped(hint, width, "  - ", "    ")]
    return "\n".join(["Advice", *said]) if said else ""


def _largest(p: Prediction, width: int) -> str:
    if not p.fits or (p.max_micro_batch_size is None and p.max_seq_len is None):
        return ""
    rows = []
    if p.max_micro_batch_size is not None:
        at = f" at {p.question['seq_len']} tokens" if _has_tokens(p.question) else ""
        rows.append(("micro batch", f"{p.max_micro_batch_size}{at}"))
    if p.max_seq_len is not None:
        rows.append(("sequence length", f"{p.max_seq_len} tokens at micro batch {p.question['micro_batch_size']}"))
    return "\n".join(["The largest that still fits, all else equal", *columns(rows)])


def _remedies(p: Prediction, width: int) -> str:
    """One row a change; where the words do not fit beside the option, they follow on a line of their own."""
    if p.fits or not p.remedies:
        return ""
    helps = any(r.verdict in (Verdict.FITS, Verdict.TIGHT) for r in p.remedies)
    title = "Any one of these makes it fit" if helps else "None of these changes is enough; they come closest"
    rows = [("GiB reserved", "", "add to the command", "which means")]
    for remedy in p.remedies:
        verdict = _HEADLINE[remedy.verdict].lower()
        rows.append((figure(hundredths(remedy.reserved_peak_bytes)), verdict, remedy.option, remedy.change))
    right = frozenset({0})
    lines = columns(rows, right)
    if max(map(len, lines)) > width:
        short = columns([row[:3] for row in rows], right)
        words: list[list[str]] = [[]] + [_wrapped(row[3], width, " " * 16, " " * 16) for row in rows[1:]]
        lines = [line for first, more in zip(short, words, strict=True) for line in (first, *more)]
    return "\n".join([title, *lines])


def _assumptions(p: Prediction, width: int) -> str:
    said = [line for item in p.assumptions for line in _wrapped(item.rstrip("."), width, "  - ", "    ")]
    if p.versions:
        named = ", ".join(f"{name} {version}" for name, version in p.versions.items())
        said += _wrapped(f"recorded with {named}", width, "  - ", "    ")
    return "\n".join(["Assumed", *said]) if said else ""


def _wrapped(text: str, width: int, first: str = "", later: str = "") -> list[str]:
    return textwrap.wrap(text, width, initial_indent=first, subsequent_indent=later, break_on_hyphens=False)


def _named(name: str, text: str, width: int) -> list[str]:
    """`name` in a narrow column, `text` wrapped beside it."""
    return _wrapped(text, width, f"{name:<8}", " " * 8)


def _cut(line: str, width: int) -> str:
    return line if len(line) <= width else line[: width - 3] + "..."
