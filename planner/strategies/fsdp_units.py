"""What FSDP wraps: which modules are units of their own, and whose parameters they hold."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from ...errors import CannotTell, UserError
from ..ledger import Component
from ..simulate import Block, Simulation
from ..trace.steptrace import EventKind, Pass, StepTrace, TensorSlot
from .fsdp_settings import FsdpSettings

ROOT = ""
_MIN_BLOCKS = 2
_LISTS = ("ModuleList", "Sequential")
FLOATS = ("float32", "bfloat16", "float16")
_EMBEDDINGS = ("embed_tokens", "wte", "word_embeddings", "embed_in", "tok_embeddings", "shared")
_HEADS = ("lm_head", "embed_out", "output", "cls.predictions.decoder", "lm_head.decoder")
_OF_PEFT = "base_model.model."
_SMALL_BUFFER = 1024  # elements: rotary frequencies and the like


def units_of(trace: StepTrace, settings: FsdpSettings) -> dict[int, tuple[str, list[TensorSlot]]]:
    """{module index: (path, parameters)} of every unit that has parameters, the root included, in the model's order."""
    names = set(_wrapped(trace, settings))
    if settings.auto_wrap_policy == "TRANSFORMER_BASED_WRAP" and trace.options.get("adapter") is not None:
        names.update(_trained_leaves(trace))
    parts: dict[str, list[TensorSlot]] = {}
    for slot in trace.params:
        parts.setdefault(wrapped_by(slot.fqn, names), []).append(slot)
    return {index: (m.fqn, parts[m.fqn]) for index, m in enumerate(trace.modules) if m.fqn in parts}


def _wrapped(trace: StepTrace, settings: FsdpSettings) -> list[str]:
    if settings.auto_wrap_policy == "NO_WRAP":
        return []
    if settings.auto_wrap_policy == "SIZE_BASED_WRAP":
        return _by_size(trace, settings.min_num_params)
    classes = settings.transformer_layer_cls_to_wrap
    if not classes:
        return longest_list([(m.fqn, m.class_name) for m in trace.modules])
    known = {m.class_name for m in trace.modules}
    for name in classes:
        if name not in known:
            what = f"transformer_layer_cls_to_wrap: the model has no module of class {name}"
            raise UserError(what, "`memplan trace MODEL` lists its modules")
    return [m.fqn for m in trace.modules if m.class_name in classes and m.fqn != ROOT]


def _trained_leaves(trace: StepTrace) -> list[str]:
    """peft's `fsdp_auto_wrap_policy` (utils/other.py), which transformers' Trainer sets: modules without parts whose weight
    trains are units of their own, so that none has frozen and trained parameters."""
    parents = {m.fqn.rpartition(".")[0] for m in trace.modules if m.fqn != ROOT}
    weights = {slot.fqn.removesuffix(".weight") for slot in trace.params if slot.requires_grad and slot.fqn.endswith(".weight")}
    return [m.fqn for m in trace.modules if m.fqn != ROOT and m.fqn in weights and m.fqn not in parents]


def _by_size(trace: StepTrace, least: int) -> list[str]:
    """`size_based_auto_wrap_policy`: from the inside out, a module that still has at least `least` parameters of its own."""
    left = {m.fqn: 0 for m in trace.modules}
    for slot in trace.params:
        path = slot.fqn.rpartition(".")[0]
        while True:
            if path in left:
                left[path] += slot.numel
            if not path:
                break
            path = path.rpartition(".")[0]
    found: list[str] = []
    for module in sorted(trace.modules, key=lambda m: depth(m.fqn)):
        if module.fqn == ROOT or module.class_name in _LISTS or left[module.fqn] < least:
            continue
        found.append(module.fqn)
        size, path = left[module.fqn], module.fqn
        while path:
            path = path.rpartition(".")[0]
            if path in left:
                left[path] -= size
    return found


def embedding_and_head(trace: StepTrace) -> tuple[str, tuple[str, ...]]:
    """What accelerate 1.15 wraps beside the blocks (`fsdp2_prepare_model`): the input embedding, and as one unit the final
    norm and the head, in the order of their forward.  A tied embedding belongs to that unit, and the first is "".

    Embedding and head are told by the names that transformers gives them; where the model runs one of them more than once,
    or not at all, there are no such units.
    """
    weights = {slot.fqn for slot in trace.params}
    classes = {m.fqn: m.class_name for m in trace.modules}
    bare = {fqn: fqn.removeprefix(_OF_PEFT) for fqn in classes}
    embedding = next((m for m in classes if m.rpartition(".")[2] in _EMBEDDINGS and f"{m}.weight" in weights), None)
    head = next((m for m in classes if bare[m] in _HEADS), None)
    blocks = longest_list(list(classes.items()))
    body = blocks[0].partition(".")[0] if blocks else ROOT
    norms = [m for m, kind in classes.items() if m.rpartition(".")[0] == body and body and "Norm" in kind]
    tied = head is not None and f"{head}.weight" not in weights
    last = [m for m in (embedding if tied else None, norms[-1] if norms else None, head) if m is not None]
    first = "" if embedding is None or tied else embedding
    if any(times_entered(trace, fqn) != 1 for fqn in (*last, *([first] if first else []))):
        return "", ()
    return first, tuple(last)


def depth(fqn: str) -> int:
    """Sorts the innermost first and the root last, as modules are wrapped."""
    return -len(fqn.split(".")) if fqn else 0


def wrapped_by(fqn: str, units: Iterable[str]) -> str:
    """The innermost unit that holds a parameter; the root where there is none."""
    return max((b for b in units if fqn.startswith(f"{b}.")), key=len, default=ROOT)


def longest_list(modules: Sequence[tuple[str, str]]) -> list[str]:
    """The blocks of the longest list of modules of one class; the first of several."""
    children: dict[str, list[tuple[str, str]]] = {}
    for fqn, kind in modules:
        if fqn:
            children.setdefault(fqn.rpartition(".")[0], []).append((fqn, kind))
    best: list[str] = []
    for fqn, kind in modules:
        found = children.get(fqn, [])
        if kind in _LISTS and len(found) >= _MIN_BLOCKS and len({k for _, k in found}) == 1 and len(found) > len(best):
            best = [name for name, _ in found]
    return best


def must_suit_narrow_trace(strategy: str, trace: StepTrace, narrow: str, *, casts_buffers: bool = False) -> None:
    """Refuses what a trace whose tensors are all `narrow` misses: in a mixed run only parameters are cast.

    Buffers stay as they are, but for FSDP1's `buffer_dtype` (`casts_buffers`), and widen what they meet; one of up to a
    thousand elements makes no difference.  Inputs are cast by the root (`CastInputs`), which a model that casts them itself
    would not show.
    """
    wide = [] if casts_buffers else [b.fqn for b in trace.buffers if b.dtype in FLOATS and b.numel > _SMALL_BUFFER]
    if wide or not set(float_inputs(trace).values()) <= {narrow}:
        what = f"the buffer {wide[0]}" if wide else "a floating-point input that the model takes wider than its parameters"
        raise CannotTell(
            f"--strategy {strategy} with a narrower param_dtype: {what} is not modelled yet. Use fp32, bf16 or fp16"
        )


def refuse_two_precisions(precision: str, settings: FsdpSettings) -> None:
    """autocast casts what is stored wide; parameters that are gathered narrow leave it nothing to cast."""
    if precision.endswith("autocast") and settings.param_dtype is not None:
        narrow = precision.partition("-")[0]
        raise CannotTell(
            f"--precision {precision} with param_dtype {settings.param_dtype}: autocast over parameters that are gathered "
            f"narrow is not modelled. Use {narrow}-mixed, which holds the same but for the ops that autocast widens"
        )


def float_inputs(trace: StepTrace) -> dict[int, str]:
    """{storage: type} of the floating-point tensors of the batch, as the first op that reads one sees it."""
    batch = set(trace.batch_storages)
    starts, inputs = trace.op_input_start.tolist(), trace.op_inputs.tolist()
    found: dict[int, str] = {}
    for op, signature in enumerate(trace.op_signature.tolist()):
        read = inputs[starts[op] : starts[op + 1]]
        if batch.isdisjoint(read):
            continue
        for storage, info in zip(read, trace.signatures[signature].inputs, strict=False):
            if storage in batch and info.dtype in FLOATS:
                found.setdefault(storage, info.dtype)
    return found


class CastInputs:
    """The floating-point inputs of a mixed run: fp32 in the batch, and cast for the root's forward (`_cast_fp_tensor`).

    The trace's batch is narrow throughout, so it stands for the first half of the wide one.  The copy lives as long as the
    root's forward, or until its backward where autograd saved it.
    """

    def __init__(self, trace: StepTrace) -> None:
        narrow = [s for s, dtype in float_inputs(trace).items() if dtype != "float32"]
        self._nbytes = [int(trace.storage_bytes[s]) for s in narrow]
        starts, inputs = trace.op_input_start.tolist(), trace.op_inputs.tolist()
        self._is_saved = any(
            kind != Pass.FORWARD and not set(narrow).isdisjoint(inputs[starts[op] : starts[op + 1]])
            for op, kind in enumerate(trace.op_pass.tolist())
        )
        self._halves: list[Block] = []
        self._copies: list[Block] = []

    def enter_root(self, sim: Simulation) -> None:
        """The forward of the root begins: the rest of the new batch, and its copy."""
        old, self._halves = self._halves, [self._made(sim, n, "other half of the input") for n in self._nbytes]
        self._copies = [self._made(sim, n, "cast input") for n in self._nbytes]
        for block in old:
            sim.free(block)

    def leave_root(self, sim: Simulation) -> None:
        """The forward of the root is over."""
        if not self._is_saved:
            self._drop(sim)

    def end_of_micro_step(self, sim: Simulation) -> None:
        """The backward is over."""
        self._drop(sim)

    def _made(self, sim: Simulation, nbytes: int, what: str) -> Block:
        return sim.alloc(Component.ACTIVATION, nbytes, what=what)

    def _drop(self, sim: Simulation) -> None:
        for block in self._copies:
            sim.free(block)
        self._copies = []


def times_entered(trace: StepTrace, fqn: str) -> int:
    """How often the forward of a module begins in one micro step."""
    named = np.array([module.fqn == fqn for module in trace.modules], bool)
    entered = trace.event_arg[(trace.event_kind == EventKind.ENTER) & (trace.event_aux == Pass.FORWARD)]
    modules = trace.call_module[entered]
    return int(named[modules[modules >= 0]].sum()) if len(named) else 0
