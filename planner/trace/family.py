"""A family of traces: one structure, sizes as expressions in (batch, seq), at the model's full depth.

A family is found from a few shallow traces (probes) and holds in a domain: a range of batch sizes, a range of lengths between
two of the model's own thresholds (sliding windows), and lengths that are, or are not, multiples of 16 (mask alignment).  The
probes lie at both ends; where they do not all run the same ops there is no family, and each (batch, seq) is traced by itself.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .depth import Expansion
from .steptrace import UNREADABLE, Signature, StepTrace, TensorInfo
from .symbolic import Expression, Fitter, Point, evaluate_tree, fit_tree

ALIGNMENT = 16  # elements; `cuda._align_mask` pads masks whose rows are no multiple of it
MAX_BATCH = 1 << 16
MAX_SEQ = 1 << 17  # for models without a limit of their own: further out the batch itself is large
_MIN_SEQ = 32  # below it every length is traced by itself


class NoFamily(Exception):
    """The probes do not agree; says why."""


@dataclass(frozen=True, slots=True)
class Domain:
    """Where a family holds: batch_min <= batch <= batch_max, seq_min <= seq <= seq_max, and seq aligned or not."""

    batch_min: int
    batch_max: int
    seq_min: int
    seq_max: int
    aligned: bool

    def __contains__(self, point: Point) -> bool:
        batch, seq = point
        inside = self.batch_min <= batch <= self.batch_max and self.seq_min <= seq <= self.seq_max
        return inside and (seq % ALIGNMENT == 0) == self.aligned

    def probes(self) -> list[Point]:
        """Points that determine every expression and check it, at both ends of the domain.  [] when it is too small."""
        step = ALIGNMENT
        low = -(-self.seq_min // step) * step
        high = self.seq_max // step * step
        if high - low < 14 * step:
            return []
        second, third = low + 3 * step, low + 10 * step
        if not self.aligned:  # odd and even, and of different remainders: what is rounded to 8 or halved must show
            low, second, third, high = low + 5, second + 10, third + 3, high - 2
        if self.batch_max == 1:
            return [(1, high), (1, low), (1, second), (1, third)]
        return [(2, high), (2, low), (2, second), (4, low), (4, second), (4, third), (3, high)]


def domains(point: Point, thresholds: Sequence[int], max_seq: int | None) -> Iterator[Domain]:
    """The domains to try for `point`, widest first."""
    batch, seq = point
    if seq < _MIN_SEQ:
        return
    cuts = sorted({t for t in thresholds if t >= _MIN_SEQ})
    top = max_seq or max(MAX_SEQ, seq)
    seq_min = max([_MIN_SEQ, *(c + 1 for c in cuts if c < seq)])
    seq_max = min([top, *(c for c in cuts if c >= seq)])
    # a batch of one takes other paths (broadcasts and copies that are not needed): a domain of its own
    batches = (1, 1) if batch == 1 else (2, MAX_BATCH)
    yield Domain(*batches, seq_min, seq_max, seq % ALIGNMENT == 0)


@dataclass(frozen=True)
class TraceFamily:
    """`at(batch, seq)` gives the trace at any point of `domain`."""

    domain: Domain
    deep: StepTrace  # structure at full depth; its sizes are those of one probe
    storage_index: np.ndarray  # deep storage -> row of `storage_sizes`
    storage_sizes: tuple[Any, ...]  # int or Expression
    signature_sizes: tuple[Any, ...]  # per signature: [inputs, outputs, scalars, flops, moved] with expressions

    def at(self, batch: int, seq: int) -> StepTrace:
        """Raises ValueError where an expression is no integer: the family does not hold there after all."""
        sizes = np.array(evaluate_tree(list(self.storage_sizes), batch, seq), np.int64)
        signatures = tuple(
            _with_sizes(s, evaluate_tree(tree, batch, seq))
            for s, tree in zip(self.deep.signatures, self.signature_sizes, strict=True)
        )
        return replace(
            self.deep,
            options={**self.deep.options, "batch_size": batch, "seq_len": seq},
            storage_bytes=sizes[self.storage_index],
            signatures=signatures,
        )

    def to_bytes(self) -> bytes:
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
            archive.writestr("trace.zip", self.deep.to_bytes())
            index = io.BytesIO()
            np.save(index, self.storage_index.astype(np.int32), allow_pickle=False)
            archive.writestr("storage_index.npy", index.getvalue())
            d = self.domain
            header = {
                "domain": [d.batch_min, d.batch_max, d.seq_min, d.seq_max, d.aligned],
                "storage_sizes": _to_data(list(self.storage_sizes)),
                "signature_sizes": _to_data(list(self.signature_sizes)),
            }
            archive.writestr("sizes.json", json.dumps(header))
        return buffer.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes) -> TraceFamily:
        """Raises ValueError for anything that is not a family of this format."""
        try:
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                deep = StepTrace.from_bytes(archive.read("trace.zip"))
                index = np.load(io.BytesIO(archive.read("storage_index.npy")), allow_pickle=False)
                header = json.loads(archive.read("sizes.json"))
                sizes, signatures = _from_data(header["storage_sizes"]), _from_data(header["signature_sizes"])
                return cls(Domain(*header["domain"]), deep, index, tuple(sizes), tuple(signatures))
        except UNREADABLE as error:
            raise ValueError(f"not a trace family: {error}") from error


def find_family(
    domain: Domain, probe: Callable[[int, int], StepTrace], deepen: Callable[[StepTrace], Expansion]
) -> TraceFamily:
    """The family in `domain` from shallow traces: `probe(batch, seq)` makes one, `deepen` extends it to the full depth.

    Raises NoFamily where the probes run different ops, or a size follows no expression.
    """
    points = domain.probes()
    if not points:
        raise NoFamily("the domain is too small for probes")
    traces: list[StepTrace] = []
    for point in points:
        traces.append(probe(*point))
        _must_agree(traces[0], traces[-1])
    fitter = Fitter(points)
    base = traces[0]
    storage_sizes = _fit_storages(fitter, traces)
    op_signature, signature_sizes, signatures = _fit_signatures(fitter, traces)
    base = replace(base, op_signature=op_signature, signatures=signatures)
    expansion = deepen(base)
    return TraceFamily(domain, replace(expansion.trace, graph=None), expansion.storage, storage_sizes, signature_sizes)


_STRUCTURE = (
    "event_kind", "event_arg", "event_aux", "op_call", "op_pass", "op_input_start", "op_inputs", "storage_role", "storage_op",
    "storage_output", "call_module", "call_parent",
)  # fmt: skip


def _must_agree(a: StepTrace, b: StepTrace) -> None:
    if a is b:
        return
    for column in _STRUCTURE:
        if not np.array_equal(getattr(a, column), getattr(b, column)):
            raise NoFamily(f"not the same steps at {_at(a)} and {_at(b)} ({column})")
    if (a.batch_storages, a.output_storages, a.loss_storage) != (b.batch_storages, b.output_storages, b.loss_storage):
        raise NoFamily(f"not the same inputs and outputs at {_at(a)} and {_at(b)}")
    pairs = set(zip(a.op_signature.tolist(), b.op_signature.tolist(), strict=True))
    for i, j in pairs:
        if _form(a.signatures[i]) != _form(b.signatures[j]):
            raise NoFamily(f"{a.signatures[i].op} at {_at(a)} is {b.signatures[j].op} at {_at(b)}")


def _at(trace: StepTrace) -> str:
    return f"batch {trace.options['batch_size']}, seq {trace.options['seq_len']}"


def _form(s: Signature) -> Any:
    """What of a signature may not depend on sizes."""
    return s.op, [(t.dtype, len(t.shape)) for t in (*s.inputs, *s.outputs)], len(s.inputs), sorted(s.scalars)


def _fit_storages(fitter: Fitter, traces: Sequence[StepTrace]) -> tuple[Any, ...]:
    rows = np.stack([t.storage_bytes for t in traces], axis=1)
    sizes: list[Any] = []
    for index, row in enumerate(rows.tolist()):
        found = row[0] if min(row) == max(row) else fitter.fit(row)
        if found is None:
            raise NoFamily(f"storage {index} follows no expression: {row}")
        sizes.append(found)
    return tuple(sizes)


def _fit_signatures(fitter: Fitter, traces: Sequence[StepTrace]) -> tuple[np.ndarray, tuple[Any, ...], tuple[Signature, ...]]:
    """Signatures told apart at any probe are different: (op -> signature, sizes of each, signatures at the first probe)."""
    stacked = np.stack([t.op_signature for t in traces], axis=1)
    distinct, op_signature = np.unique(stacked, axis=0, return_inverse=True)
    sizes, signatures = [], []
    for row in distinct.tolist():
        members = [t.signatures[i] for t, i in zip(traces, row, strict=True)]
        sizes.append(_fit_signature(fitter, members))
        signatures.append(members[0])
    return op_signature.reshape(-1).astype(np.int32), tuple(sizes), tuple(signatures)


def _fit_signature(fitter: Fitter, members: Sequence[Signature]) -> Any:
    first = members[0]

    def fail() -> None:
        raise NoFamily(f"a shape of {first.op} follows no expression")

    def infos(which: str) -> list[Any]:
        found = []
        for i in range(len(getattr(first, which))):
            tensors: list[TensorInfo] = [getattr(m, which)[i] for m in members]
            shape = [fit_tree(fitter, [t.shape[d] for t in tensors], fail) for d in range(len(tensors[0].shape))]
            # the stride of a dimension of size 1 means nothing
            stride = [_fit_stride(fitter, tensors, d) for d in range(len(tensors[0].shape))]
            found.append([shape, stride])
        return found

    return [
        infos("inputs"),
        infos("outputs"),
        [fit_tree(fitter, [m.scalars[k] for m in members], lambda: None) for k in sorted(first.scalars)],
        fit_tree(fitter, [m.flops for m in members], fail),
        fit_tree(fitter, [m.moved_bytes for m in members], fail),
    ]


def _fit_stride(fitter: Fitter, tensors: Sequence[TensorInfo], dim: int) -> Any:
    values = [t.stride[dim] if t.shape[dim] != 1 else None for t in tensors]
    given = [v for v in values if v is not None]
    if not given or min(given) == max(given):
        return given[0] if given else tensors[0].stride[dim]
    found = fitter.fit(values)
    return tensors[0].stride[dim] if found is None else found


def _with_sizes(signature: Signature, sizes: Any) -> Signature:
    inputs, outputs, scalars, flops, moved = sizes
    return Signature(
        op=signature.op,
        inputs=tuple(TensorInfo(t.dtype, tuple(i[0]), tuple(i[1])) for t, i in zip(signature.inputs, inputs, strict=True)),
        outputs=tuple(TensorInfo(t.dtype, tuple(o[0]), tuple(o[1])) for t, o in zip(signature.outputs, outputs, strict=True)),
        scalars=dict(zip(sorted(signature.scalars), scalars, strict=True)),
        flops=flops,
        moved_bytes=moved,
    )


def _to_data(tree: Any) -> Any:
    if isinstance(tree, list):
        return [_to_data(t) for t in tree]
    return {"e": tree.to_data()} if isinstance(tree, Expression) else tree


def _from_data(data: Any) -> Any:
    if isinstance(data, list):
        return [_from_data(d) for d in data]
    return Expression.from_data(data["e"]) if isinstance(data, dict) else data
