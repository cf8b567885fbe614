"""The door to the search: `make_plan` opens level after level until something fits, and says why not where nothing does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...errors import CannotTell, UserError
from ...units import gib
from ..recompute.policy import SELECTIVE
from .bounds import Bounds
from .plan import Candidate, Plan, Refused
from .search import Found, Judged, Score, candidate_of, judge, row_of, score_of, search, shape_of
from .space import NVME, TO_THE_HOST, Wanted, candidates, divisors, levels

if TYPE_CHECKING:
    from ...models import ModelSpec
    from ..request import Request
    from ..trace.source import TraceSource

DEFAULT_PER_GPU = 8  # samples of one GPU in a step, where --global-batch is not given
_CLOSEST_TRIED = 2  # configurations with the lowest bounds that are simulated where nothing fits
_MOST_REFUSED = 4
_MOST_EVENTS = 50_000  # of a micro step: beyond it choosing what is recomputed takes half a minute
_MOST_TIMES_GPUS = 128
_SHARDED = ("zero3", "fsdp2")  # what shards all, and is tried on more GPUs
_FEWER_GPUS = (1, 2, 4, 8)  # of one machine, tried for the least cost
_WORTH_SAYING = 1 << 30  # bytes of host memory
_SHORTEST = 64  # tokens; shorter samples are no way out


def plan(
    model: str | ModelSpec,
    gpu: str = "auto",
    *,
    gpus: int = 1,
    global_batch_size: int | None = None,
    top: int = 3,
    traces: TraceSource | None = None,
    **options: Any,
) -> Plan:
    """Which configuration to run.

    **Main arguments.**  `model`, `gpu`: as for `memplan.fits`.  `gpus`: in all.  `global_batch_size`: samples in one optimizer
    step of all GPUs together (default: 8 each).

    **Other arguments.**  The fields of `Wanted` (`methods`, `strategies`, `objective` ...) as tuples; `top` rows; and what does
    not differ between candidates, as for `memplan.fits`: `nodes`, `seq_len`, `host_ram_bytes`, `attention` ...

    **Returns** a Plan; where nothing fits, it has no candidates and says what comes closest.

    **Raises** UserError for input that cannot be used.
    """
    from ..trace.source import TraceSource

    choices = {name: options.pop(name) for name in list(options) if name in Wanted.__dataclass_fields__}
    wanted = Wanted(global_batch_size=global_batch_size or DEFAULT_PER_GPU * gpus, **choices)
    bases = questions(model, gpu, gpus, wanted, named=global_batch_size is not None, **options)
    return make_plan(bases, wanted, traces or TraceSource(), top=top)


def questions(
    model: str | ModelSpec, gpu: str, gpus: int, wanted: Wanted, *, named: bool = True, nodes: int | None = None, **options: Any
) -> dict[int, Request]:
    """By number of GPUs, the question without what is searched; `named`: the user gave the global batch."""
    from ..api import make_request

    wanted.check()
    smaller = [n for n in _FEWER_GPUS if n < gpus] if wanted.objective == "cost" else []
    found = {}
    for count in (*smaller, gpus):
        on = nodes if count == gpus else 1
        # precision and micro batch are every candidate's own
        base = make_request(model, gpu, gpus=count, nodes=on, precision="fp32", micro_batch_size=1, **options)
        said = () if named else (f"{wanted.global_batch_size} samples a step (not given)",)
        found[count] = replace(base, defaults=(*base.defaults, *said))
    return found


def make_plan(
    bases: Mapping[int, Request],
    wanted: Wanted,
    traces: TraceSource,
    *,
    top: int = 3,
    say: Callable[[str], None] = lambda text: None,
) -> Plan:
    """The `top` best configurations, or why there is none.

    `bases`: by number of GPUs, the question without what is searched; the largest is the machine that was asked about.
    Raises UserError where the global batch cannot be divided, or where no configuration answers to the user's choices.
    """
    wanted.check()
    base = bases[max(bases)]
    _check_batch(base, wanted)
    bounds = Bounds(traces)
    notes: list[str] = []
    seen: set[Any] = set()
    everything = Found()
    why_not: dict[str, str] = {}
    for number, level in enumerate(levels(wanted, nvme=base.nvme_bytes is not None, alone=len(bases) == 1 and base.gpus == 1)):
        fresh = [r for r in candidates(bases, wanted, level, why_not) if (shape_of(r), r.micro_batch_size) not in seen]
        seen |= {(shape_of(r), r.micro_batch_size) for r in fresh}
        if not fresh:
            continue
        found = search(fresh, traces, objective=wanted.objective, top=top, bounds=bounds, say=say)
        everything.num_considered += found.num_considered
        everything.num_simulated += found.num_simulated
        everything.refused += found.refused
        if found.best:
            if wanted.recomputes is None:
                notes += _refine(found, wanted, traces, say)
            if number:
                alone = (
                    "nothing fits on the GPU alone"
                    if level.words == TO_THE_HOST
                    else "nothing fits without giving something up"
                )
                notes.append(f"{alone}: {level.words}")
            everything.best = found.best
            break
    if not everything.num_considered:
        because = f": {next(iter(why_not.values()))}" if why_not else ""
        step = "Leave some of --method, --strategy, --precision, --optimizer, --offload ... out"
        raise UserError(f"no configuration answers to these choices{because}", step)
    unanswered = [refused.reason for _, _, refused in everything.refused if not refused.needs_bytes]
    if not everything.best and unanswered and len(unanswered) == len(everything.refused):
        raise UserError(f"no configuration can be answered for: {unanswered[0].rstrip('.')}", "Or choose otherwise")
    tried = {shape[0] for shape, _ in seen}
    notes += [f"--method {m} is not among them: {why_not[m]}" for m in wanted.methods or () if m in why_not and m not in tried]
    return _plan(base, bases, wanted, everything, bounds, traces, notes, top)


def _refine(found: Found, wanted: Wanted, traces: TraceSource, say: Callable[[str], None]) -> list[str]:
    """Where the first row recomputes every block: which results it has room to keep.  What is to be said of it."""
    score, judged = found.ranked()[0]
    if judged.request.recompute != "full" or wanted.objective == "memory" or not judged.request.has_backward:
        return []
    if len(traces.step(judged.request).event_kind) > _MOST_EVENTS:
        return ["the model is deep: --recompute selective, which may be faster, was not tried"]
    say("choosing what is recomputed")
    try:
        better = judge(judged.request.but(recompute=SELECTIVE), traces)
    except (CannotTell, UserError):
        return []
    found.num_simulated += 1
    if better.prediction.fits and score_of(wanted.objective, better) < score:
        found.best[row_of(judged.request)] = score_of(wanted.objective, better), better
    return []


def _check_batch(base: Request, wanted: Wanted) -> None:
    batch = wanted.global_batch_size
    if batch % base.gpus:
        near = sorted({max(base.gpus, batch // base.gpus * base.gpus), -(-batch // base.gpus) * base.gpus})
        raise UserError(f"--global-batch {batch}: does not divide over {base.gpus} GPUs", f"Use {' or '.join(map(str, near))}")
    micro = wanted.micro_batch_size
    if micro is not None and batch // base.gpus % micro:
        fitting = ", ".join(map(str, divisors(batch // base.gpus)))
        raise UserError(
            f"--micro-batch {micro}: {batch // base.gpus} samples of each GPU do not divide by it", f"Use one of {fitting}"
        )


def _plan(
    base: Request,
    bases: Mapping[int, Request],
    wanted: Wanted,
    found: Found,
    bounds: Bounds,
    traces: TraceSource,
    notes: list[str],
    top: int,
) -> Plan:
    ranked = found.ranked()[:top]
    rows = tuple(candidate_of(judged.request, judged, _why_not_more(judged.request, found)) for _, judged in ranked)
    closest, would_fit = (None, ()) if rows else _closest(base, wanted, found, bounds, traces)
    times = [judged.time for _, judged in ranked if judged.time is not None]
    notes += [note for time in times[:1] for note in time.assumptions]
    if rows and not times:
        notes.append("no step times: the network between the machines is not known, so memory decides the order")
    notes += _alike(rows)
    if rows and base.host_ram_bytes is None and rows[0].host_bytes >= _WORTH_SAYING:
        notes.append(f"each machine has the {gib(rows[0].host_bytes, 0)} of host memory that the first row needs (--host-ram)")
    if rows and rows[0].verdict == "tight":
        notes.append("nothing fits with room to spare: try it before you rely on it")
    return Plan(
        question=_question(base, bases, wanted),
        base=base.as_data(),
        gpu=base.device.name,
        usable_bytes=base.device.usable_bytes,
        global_batch_size=wanted.global_batch_size,
        seq_len=base.seq_len,
        objective=wanted.objective,
        candidates=rows,
        refused=_refused(found, ranked, wanted.objective) if ranked else (),
        closest=closest,
        would_fit=would_fit,
        notes=(*base.defaults, *notes),
        counts_samples=any(time.counts_samples for time in times),
        num_considered=found.num_considered,
        num_simulated=found.num_simulated,
        versions=ranked[0][1].prediction.versions if ranked else None,
    )


def _alike(rows: tuple[Candidate, ...]) -> list[str]:
    """Which rows the predicted times cannot tell apart from the first."""
    from ..timeline.roofline import typical_error

    error, times = typical_error(), [row.step_s for row in rows]
    first = times[0] if times else None
    if first is None:
        return []
    alike = [str(n) for n, time in enumerate(times[1:], 2) if time is not None and abs(time / first - 1) < error]
    if not alike:
        return []
    which = f"row {alike[0]} is" if len(alike) == 1 else f"rows {', '.join(alike)} are"
    return [f"step times are off by {error:.0%} at the median: {which} as fast as row 1 for all that is known"]


def _question(base: Request, bases: Mapping[int, Request], wanted: Wanted) -> dict[str, Any]:
    choices = {
        name: getattr(wanted, name)
        for name in ("methods", "strategies", "precisions", "optimizers", "recomputes", "offloads", "micro_batch_size")
    }
    return {
        "model": base.model.name,
        "task": base.model.task,
        "gpu": base.device.key,
        "gpus": base.gpus,
        "nodes": base.nodes,
        "seq_len": base.seq_len,
        "target_len": base.target_len,
        "image_size": base.image_size,
        "attention": base.attention,
        "loss": base.loss,
        "host_ram_bytes": base.host_ram_bytes,
        "nvme_bytes": base.nvme_bytes,
        **choices,
    }


def _why_not_more(request: Request, found: Found) -> str:
    """Why the next larger micro batch of the same shape was refused; "" where none was."""
    shape = shape_of(request)
    each = request.micro_batch_size * request.loop.grad_accum_steps
    larger = [
        refused
        for _, other, refused in found.refused
        if shape_of(other) == shape and other.micro_batch_size > request.micro_batch_size
    ]
    if not larger:
        return ""
    next_one = min(larger, key=lambda refused: refused.micro_batch_size)
    between = [n for n in divisors(each) if request.micro_batch_size < n < next_one.micro_batch_size]
    no_better = f"micro batch {' and '.join(map(str, between))} would not come before it, and " if between else ""
    return f"{no_better}micro batch {next_one.micro_batch_size} {next_one.reason}"


def _refused(found: Found, ranked: list[tuple[Score, Judged]], objective: str) -> tuple[Refused, ...]:
    """What would have been ranked before the winner: of each row that the plan has not, the first."""
    winner = ranked[0][0]
    shown = {row_of(judged.request) for _, judged in ranked}
    picked: dict[Any, Refused] = {}
    for score, request, refused in sorted(found.refused, key=lambda entry: entry[0]):
        first = score < winner and not (objective == "memory" and refused.needs_bytes >= winner[0])  # the score was a bound
        if first and row_of(request) not in shown:
            picked.setdefault(row_of(request), refused)
    return tuple(picked.values())[:_MOST_REFUSED]


# -- nothing fits ------------------------------------------------------------------------------------------------------------


def _closest(
    base: Request, wanted: Wanted, found: Found, bounds: Bounds, traces: TraceSource
) -> tuple[Refused | None, tuple[str, ...]]:
    """(what comes closest, what would make it fit)."""
    lowest = sorted(
        ((max(refused.needs_bytes, bounds.floor_bytes(request)), request, refused) for _, request, refused in found.refused),
        key=lambda entry: (entry[0], entry[1].micro_batch_size, entry[1].recompute == "none"),
    )
    best: tuple[int, Request, Refused] | None = None
    for low, request, refused in lowest[:_CLOSEST_TRIED]:
        if best is not None and low >= best[0]:
            break
        try:
            judged = judge(_short(request), traces)
        except (CannotTell, UserError):
            continue
        needs = judged.prediction.allocated_peak_bytes
        exact = replace(refused, needs_bytes=needs, simulated=True, reason=judged.prediction.reason)
        if best is None or needs < best[0]:
            best = needs, request, exact
    if best is None:
        return (lowest[0][2] if lowest else None), ()
    return best[2], tuple(_would_fit(best[1], wanted, traces))


def _would_fit(request: Request, wanted: Wanted, traces: TraceSource) -> list[str]:
    """Changes outside the search that make the closest configuration fit; each was simulated."""
    said = []
    host = judge(_short(request), traces).prediction
    if host.failure is None:
        if request.host_ram_bytes is not None and host.host.node_bytes > request.host_ram_bytes:
            said.append(f"{gib(host.host.node_bytes)} of host memory in each machine (--host-ram)")
            said += _on_nvme(request, traces) if request.nvme_bytes is None and wanted.offloads is None else []
        if request.nvme_bytes is not None and host.host.node_nvme_bytes > request.nvme_bytes:
            said.append(f"{gib(host.host.node_nvme_bytes)} on NVMe in each machine (--nvme)")
        return said
    more = _more_gpus(request, wanted, traces)
    if more:
        said.append(more)
    card = _larger_card(request, host.allocated_peak_bytes, traces)
    if card:
        said.append(card)
    length = _shorter(request, traces)
    if length:
        said.append(length)
    return said


def _on_nvme(request: Request, traces: TraceSource) -> list[str]:
    """What is offloaded, on NVMe instead, where that fits."""
    for offload in reversed(NVME):
        asked = request.but(strategy="zero3", offload=offload)
        try:
            asked.check()
            found = judge(_short(asked), traces).prediction
        except (CannotTell, UserError):
            continue
        if found.fits:
            return [f"{gib(found.host.node_nvme_bytes)} on NVMe in each machine (--nvme; {candidate_of(asked).name})"]
    return []


def _short(request: Request) -> Request:
    """The same memory from two micro steps."""
    return request.but(grad_accum_steps=min(2, request.loop.grad_accum_steps))


def _fits(request: Request, traces: TraceSource) -> bool:
    try:
        request.check()
        return judge(_short(request), traces).prediction.fits
    except (CannotTell, UserError):
        return False


def _more_gpus(request: Request, wanted: Wanted, traces: TraceSource) -> str:
    from ..strategies.outside import with_nccl

    each = request.gpus // request.nodes
    times = 2
    while times <= _MOST_TIMES_GPUS:
        gpus = request.gpus * times
        own = "fsdp2" if request.strategy in ("single", "release", "ddp") else request.strategy
        nodes = max(1, gpus // 8) if each >= 4 or gpus > 8 else 1  # 8 GPUs a machine, as they are sold
        accumulated = max(1, wanted.global_batch_size // gpus // request.micro_batch_size)
        for strategy in dict.fromkeys((own, *(_SHARDED if wanted.strategies is None else ()))):
            precision = request.precision.replace("-autocast", "-mixed") if strategy in _SHARDED else request.precision
            device = request.device if request.gpus > 1 else with_nccl(request.device, gpus, strategy)
            asked = request.but(
                gpus=gpus, nodes=nodes, strategy=strategy, precision=precision, device=device, grad_accum_steps=accumulated,
                micro_batch_size=min(request.micro_batch_size, max(1, wanted.global_batch_size // gpus)),
                optimizer_impl="default" if strategy.startswith("zero") else request.optimizer_impl,
            )  # fmt: skip
            if _fits(asked, traces):
                batch = f", {gpus} samples a step" if gpus > wanted.global_batch_size else ""
                return f"{gpus} GPUs of this kind ({candidate_of(asked).name}, micro batch {asked.micro_batch_size}{batch})"
        times *= 2
    return ""


def _larger_card(request: Request, needs_bytes: int, traces: TraceSource) -> str:
    from ...hardware.catalogue import device
    from ..advice import _USUAL_CARDS
    from ..strategies.outside import with_nccl

    cards = (with_nccl(device(key), request.gpus, request.strategy) for key in _USUAL_CARDS)
    for card in sorted(cards, key=lambda d: d.usable_bytes):
        if card.usable_bytes >= needs_bytes and _fits(request.but(device=card), traces):
            return f"{card.name} ({candidate_of(request).name}, micro batch {request.micro_batch_size})"
    return ""


def _shorter(request: Request, traces: TraceSource) -> str:
    from ..advice import max_seq_len

    if request.seq_len <= _SHORTEST or not _fits(request.but(seq_len=_SHORTEST), traces):
        return ""  # it is not the activations
    length = max_seq_len(_short(request), traces)
    if not length or length >= request.seq_len:
        return ""
    return f"sequences of {length} tokens ({candidate_of(request).name}, micro batch {request.micro_batch_size})"


def best_request(plan_row: Candidate, base: Request) -> Request:
    """The question that a row of a plan answers."""
    from ..strategies.zo_settings import ZoSettings

    return base.but(
        method=plan_row.method,
        strategy=plan_row.strategy,
        precision=plan_row.precision,
        optimizer=plan_row.optimizer,
        optimizer_impl=plan_row.optimizer_impl,
        recompute=plan_row.recompute,
        offload=plan_row.offload,
        zo=ZoSettings(zo_data=plan_row.gpus) if plan_row.method == "distzo2" else None,
        micro_batch_size=plan_row.micro_batch_size,
        grad_accum_steps=plan_row.grad_accum_steps,
        alloc_conf=plan_row.alloc_conf,
    )


def request_of_plan(plan: Plan, row: int = 0, source: str = "plan.json") -> Request:
    """The question that a row of a plan answers, from plan.json alone; `row` counts from 0.

    Raises UserError where the plan has no such row, and for what `question.request_of` refuses.
    """
    from ..question import request_of

    if not 0 <= row < len(plan.candidates):
        rows = f"{len(plan.candidates)} rows" if plan.candidates else "no rows: nothing fitted"
        raise UserError(f"{source}: there is no row {row + 1}; the plan has {rows}", "Rows count from 1")
    best = plan.candidates[row]
    data = {**plan.base, "gpus": best.gpus, "nodes": best.nodes}
    return best_request(best, request_of(data, source))
