"""Records what one step does: a dispatch mode above FakeTensorMode that writes ops, storages and module calls as they happen.

Every op becomes a node of one `torch.fx.Graph`.  Every op that makes or writes a storage (not a view) is an event too; every
new storage an ALLOC; its death, seen by a weak reference, a FREE.  Nothing is kept alive by the recorder.

**What a dispatch mode changes, and how it is undone.**  While any dispatch mode is on, autograd believes that every tensor
is a subclass (ATen/TensorSubclassLikeUtils.h) and writes out of place where it would write in place:

* a gradient that reaches a tensor from two users is `old + new` instead of `old.add_(new)`
  (torch/csrc/autograd/input_buffer.cpp, `can_accumulate_inplace`).  The real condition, that the buffer is the last owner of
  the tensor and of its storage, is read from the reference counts, whose baseline is calibrated at start-up;
* the backward of max, sort, index, gather ... scatters into fresh zeros out of place.

In both cases the recorder returns the first argument itself, so that lifetimes stay those of the real run.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from .calls import ACCUMULATE_GRAD, ModuleCalls
from .fakes import Arguments, FakeResults
from .shadow import Shadows
from .steptrace import EventKind, ModuleInfo, Pass, Phase, Role, Signature, StepTrace, TensorInfo, TensorSlot

aten = torch.ops.aten
_PRIM_DEVICE = torch.ops.prim.device.default
_ADD = aten.add.Tensor
# Out-of-place scatters that autograd's formulas do in place when no dispatch mode is on, and only there
# (torch/csrc/autograd/FunctionsManual.cpp, every use of areAnyTensorSubclassLike / isTensorSubclassLike).
_IN_PLACE_IN_BACKWARD = {
    aten.scatter.src: aten.scatter_.src,
    aten.scatter.value: aten.scatter_.value,
    aten.scatter_add.default: aten.scatter_add_.default,
    aten.index_put.default: aten.index_put_.default,
    aten.index_add.default: aten.index_add_.default,
    aten.masked_scatter.default: aten.masked_scatter_.default,
}
# Products of two matrices: scores and values; in backward scores again, and the gradients of values, weights, queries and keys.
_ATTENTION_PRODUCTS = {"memplan.attention": 2, "memplan.attention_backward": 5}
_ENGINE = torch.autograd.graph._engine_run_backward.__code__
_VIEW_FREE = 0


class Recorder(TorchDispatchMode):
    """Use: `with Recorder(module, fake_mode) as recorder: recorder.begin(batch); ...; trace = recorder.finish(...)`.

    The fake mode itself is not entered meanwhile: the recorder sees every op and asks it where it must.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        mode: FakeTensorMode,
        *,
        storage_bytes: Callable[..., int] | None = None,
        with_graph: bool = True,
    ) -> None:
        """`storage_bytes(func, output index, tensor, args) -> bytes` overrides the size of an output whose real dtype differs.

        `with_graph=False` leaves out the fx graph, which a probe of a family does not need.
        """
        super().__init__()
        self._module = module
        self._fakes = FakeResults(mode)
        self._storage_bytes = storage_bytes
        self._shadows = Shadows()
        self.graph = torch.fx.Graph() if with_graph else None
        self._kind: list[int] = []
        self._arg: list[int] = []
        self._aux: list[int] = []
        self._signature_index: dict[Any, int] = {}
        self._signatures: list[Signature] = []
        self._op_signature: list[int] = []
        self._op_call: list[int] = []
        self._op_pass: list[int] = []
        self._op_input_start: list[int] = [0]
        self._op_inputs: list[int] = []
        self._bytes: list[int] = []
        self._role: list[int] = []
        self._birth_op: list[int] = []
        self._birth_output: list[int] = []
        self._birth_node: list[int] = []  # sequence number of the autograd node that made it, -1 in forward
        self._live: dict[int, tuple[int, Any]] = {}  # address of the StorageImpl -> (storage, weak reference)
        self._phase = Phase.FORWARD
        self._calls = ModuleCalls(module, self._emit, self.storages)
        self._params: list[TensorSlot] = []
        self._buffers: list[TensorSlot] = []
        self._batch: tuple[int, ...] = ()
        self._handles: list[Any] = []
        self._exclusive = _exclusive_reference_counts()
        self._recording = False
        self._failed_in = ""
        self._register_model()

    # -- the life of a recording ---------------------------------------------------------------------------------------

    def begin(self, batch: Iterable[torch.Tensor]) -> None:
        """The inputs of the step exist; forward starts."""
        self._batch = tuple(dict.fromkeys(self._storage_of(t, Role.BATCH) for t in batch))
        self._recording = True
        self._emit(EventKind.PHASE, Phase.FORWARD)

    def __enter__(self) -> Recorder:
        self._handles += self._calls.install()
        for index, param in enumerate(self._trainable):
            if param is not None:
                self._handles.append(param.register_post_accumulate_grad_hook(self._grad_hook(index)))
        super().__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def enter_phase(self, phase: Phase) -> None:
        self._phase = phase
        self._calls.in_backward = phase is Phase.BACKWARD
        if phase is Phase.BACKWARD:
            self._calls.start_backward()
        self._emit(EventKind.PHASE, phase)

    def storages(self, value: Any) -> tuple[int, ...]:
        """The storages behind every tensor in a (nested) output, in order, each once."""
        found: dict[int, None] = {}
        for tensor in _tensors_in(value):
            key = tensor.untyped_storage()._cdata
            if key in self._live:
                found[self._live[key][0]] = None
        return tuple(found)

    def finish(
        self,
        *,
        name: str,
        options: dict[str, Any],
        versions: dict[str, str],
        loss: int,
        assumptions: Iterable[str],
    ) -> StepTrace:
        self._calls.finish_backward()
        self._recording = False
        self._settle_roles()
        module_names = dict(self._calls.modules)
        return StepTrace(
            name=name,
            options=options,
            versions=versions,
            modules=tuple(ModuleInfo(fqn, cls) for fqn, cls in module_names.items()),
            params=tuple(self._params),
            buffers=tuple(self._buffers),
            signatures=tuple(self._signatures),
            event_kind=np.array(self._kind, np.int8),
            event_arg=np.array(self._arg, np.int32),
            event_aux=np.array(self._aux, np.int32),
            op_signature=np.array(self._op_signature, np.int32),
            op_call=np.array(self._op_call, np.int32),
            op_pass=np.array(self._op_pass, np.int8),
            op_input_start=np.array(self._op_input_start, np.int32),
            op_inputs=np.array(self._op_inputs, np.int32),
            storage_bytes=np.array(self._bytes, np.int64),
            storage_role=np.array(self._role, np.int8),
            storage_op=np.array(self._birth_op, np.int32),
            storage_output=np.array(self._birth_output, np.int16),
            call_module=np.array(self._calls.call_module, np.int32),
            call_parent=np.array(self._calls.call_parent, np.int32),
            batch_storages=self._batch,
            output_storages=self._calls.root_output,
            loss_storage=loss,
            assumptions=tuple(assumptions),
            graph=self.graph,
        )

    @contextlib.contextmanager
    def frees_in_order(self) -> Iterator[None]:
        """Orders the deaths inside by storage: for what dies in the order of a hash map, which means nothing."""
        start = len(self._kind)
        yield
        if all(kind == EventKind.FREE for kind in self._kind[start:]):
            self._arg[start:] = sorted(self._arg[start:])

    def where(self) -> str:
        """The module that runs now, or in which the last op failed; for messages."""
        return self._failed_in or self._calls.running_fqn()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would wrap every dispatch to keep the compiler out; nothing is compiled here

    # -- dispatch ------------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _PRIM_DEVICE:  # C++ asks a FakeTensor for its device; not an op
            return args[0].fake_device
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled() and func._can_decompose():  # without autograd composite ops arrive whole
            TorchDispatchMode.__enter__(self)  # only the mode: this class's own `__enter__` installs hooks
            try:
                return func.decompose(*args, **kwargs)
            finally:
                TorchDispatchMode.__exit__(self, None, None, None)
        known = self._shadows.answer(func, args, kwargs)
        if known is not Shadows.UNKNOWN:
            return known
        node_sequence = self._calls.running_node() if self._phase is Phase.BACKWARD else -1
        # the engine itself, or a formula of its own: not a user's autograd.Function, whose Python frame would be the caller
        if node_sequence >= 0 and sys._getframe(1).f_code is _ENGINE:
            in_place = _IN_PLACE_IN_BACKWARD.get(func)
            if func is _ADD and self._engine_adds_in_place(args):
                in_place = aten.add_.Tensor
            elif in_place is not None and not self._made_by(args[0], node_sequence):
                in_place = None
            if in_place is not None:
                self._record(in_place, args, kwargs, self._read_arguments(in_place, args, kwargs), args[0], node_sequence)
                return args[0]
        read = self._read_arguments(func, args, kwargs)
        try:
            out = self._fakes.run(func, args, kwargs, read)
        except Exception:
            self._failed_in = self._calls.running_fqn()  # the hooks that see the exception pass leave the modules
            raise
        self._record(func, args, kwargs, read, out, node_sequence)
        self._shadows.follow(func, args, kwargs, out)
        return out

    def _engine_adds_in_place(self, args: Any) -> bool:
        old, new = args[0], args[1]
        if torch.is_grad_enabled() or not isinstance(new, torch.Tensor) or len(args) != 2 or old.shape != new.shape:
            return False
        counts = (torch._C._storage_Use_Count(old.untyped_storage()._cdata), old._use_count())
        return counts == self._exclusive and old.dtype == new.dtype and _dense(old)

    def _made_by(self, tensor: torch.Tensor, node_sequence: int) -> bool:
        entry = self._live.get(tensor.untyped_storage()._cdata)
        return entry is not None and self._birth_node[entry[0]] == node_sequence

    # -- writing -------------------------------------------------------------------------------------------------------

    def _emit(self, kind: EventKind, arg: int, aux: int = 0) -> None:
        if self._recording:
            self._kind.append(kind)
            self._arg.append(arg)
            self._aux.append(aux)

    def _read_arguments(self, func: Any, args: Any, kwargs: Any) -> Arguments:
        inputs: list[torch.Tensor] = []
        key: list[Any] = [func]
        node_args = tuple([self._argument(a, inputs, key) for a in args])
        node_kwargs = {k: self._argument(v, inputs, key, k) for k, v in kwargs.items()}
        fixed = tuple(key)
        try:
            hash(fixed)
        except TypeError:  # an unhashable argument (a Generator, a nested list)
            return Arguments(inputs, None, node_args, node_kwargs)
        return Arguments(inputs, fixed, node_args, node_kwargs)

    def _record(self, func: Any, args: Any, kwargs: Any, read: Arguments, out: Any, node_sequence: int) -> None:
        inputs = read.inputs
        outputs = [out] if isinstance(out, torch.Tensor) else [t for t in out if isinstance(t, torch.Tensor)] if isinstance(out, (tuple, list)) else []  # fmt: skip  # noqa: E501
        node = None
        if self.graph is not None:
            node = self.graph.call_function(func, read.node_args, read.node_kwargs)
            for tensor in outputs:
                tensor._memplan_node = node  # type: ignore[attr-defined]  # dies with the tensor: the graph keeps no tensor alive
        fresh = [(i, t, s) for i, t in enumerate(outputs) if (s := t.untyped_storage())._cdata not in self._live]
        if not fresh and not func._schema.is_mutable:
            return  # a view: a node of the graph, but nothing happens in memory
        op = len(self._op_signature)
        if node is not None:
            node.meta["op"] = op
        self._op_signature.append(self._signature(func, read, outputs, args, kwargs, out))
        call, run = self._calls.position(node_sequence, self._phase is Phase.BACKWARD)
        self._op_call.append(call)
        self._op_pass.append(run)
        self._emit(EventKind.OP, op)
        for tensor in inputs:
            self._op_inputs.append(self._storage_of(tensor, Role.BUFFER))
        self._op_input_start.append(len(self._op_inputs))
        for index, tensor, storage in fresh:
            if storage._cdata in self._live:  # two outputs of one storage
                continue
            nbytes = self._storage_bytes(func, index, tensor, args) if self._storage_bytes else -1
            self._new_storage(storage, Role.TEMP, storage.nbytes() if nbytes < 0 else nbytes, op, index, node_sequence)

    def _argument(self, value: Any, inputs: list[torch.Tensor], key: list[Any], name: str = "") -> Any:
        """The fx form of one argument; collects its tensors in `inputs` and what makes the signature in `key`."""
        if isinstance(value, torch.Tensor):
            inputs.append(value)
            key.append((value.dtype, tuple(value.shape), value.stride()))
            if self.graph is None:
                return None
            node = getattr(value, "_memplan_node", None)
            if node is None:
                node = self.graph.placeholder(f"storage_{self._storage_of(value, Role.BUFFER)}")
                value._memplan_node = node  # type: ignore[attr-defined]
            return node
        if isinstance(value, (list, tuple)):
            if value and any(isinstance(v, torch.Tensor) for v in value):
                return [self._argument(v, inputs, key) for v in value]
            value = list(value)
            key.append((name, tuple(value)))
            return value
        key.append((name, value))
        return value

    def _signature(self, func: Any, read: Arguments, outputs: list[Any], args: Any, kwargs: Any, out: Any) -> int:
        found = self._signature_index.get(read.key) if read.key is not None else None
        if found is not None:
            return found
        infos = tuple(map(_info, read.inputs))
        results = tuple(map(_info, outputs))
        moves = not func.is_view and func is not aten.detach.default
        scalars = {str(i): _plain(a) for i, a in enumerate(args) if not _holds_tensor(a)}
        scalars |= {k: _plain(v) for k, v in kwargs.items() if not _holds_tensor(v)}
        index = len(self._signatures)
        self._signatures.append(
            Signature(
                op=str(func),
                inputs=infos,
                outputs=results,
                scalars=scalars,
                flops=_flops(func, infos, args, kwargs, out),
                moved_bytes=sum(t.nbytes for t in infos + results) if moves else _VIEW_FREE,
            )
        )
        if read.key is not None:
            self._signature_index[read.key] = index
        return index

    def _storage_of(self, tensor: torch.Tensor, role: Role) -> int:
        """The storage behind a tensor; one that no op made (a constant of the module, an input) is registered as `role`."""
        storage = tensor.untyped_storage()
        entry = self._live.get(storage._cdata)
        if entry is not None:
            return entry[0]
        return self._new_storage(storage, role, storage.nbytes(), -1, 0, -1)

    def _new_storage(self, storage: Any, role: Role, nbytes: int, op: int, output: int, node: int) -> int:
        index = len(self._bytes)
        key = storage._cdata
        self._bytes.append(nbytes)
        self._role.append(role)
        self._birth_op.append(op)
        self._birth_output.append(output)
        self._birth_node.append(node)

        def died(_: Any) -> None:
            del self._live[key]
            if role is Role.TEMP or role is Role.BATCH:
                self._emit(EventKind.FREE, index)

        self._live[key] = (index, weakref.ref(storage, died))
        if role is Role.TEMP:
            self._emit(EventKind.ALLOC, index)
        return index

    def _grad_hook(self, index: int) -> Callable[[torch.Tensor], None]:
        def ready(param: torch.Tensor) -> None:
            if param.grad is None or not self._recording:
                return
            storage = self._storage_of(param.grad, Role.TEMP)
            # a storage that AccumulateGrad itself made is its copy into the parameter's layout
            copied = self._birth_node[storage] == ACCUMULATE_GRAD
            self._role[storage] = Role.GRAD_COPY if copied else Role.GRAD
            self._emit(EventKind.GRAD, index, storage)
            param.grad = None  # from here the gradient is the strategy's

        return ready

    # -- the model -----------------------------------------------------------------------------------------------------

    def _register_model(self) -> None:
        owners = {fqn: i for i, fqn in enumerate(self._calls.modules)}
        self._trainable: list[torch.Tensor | None] = []
        for tensor in (*self._module.parameters(), *self._module.buffers()):
            tensor.__dict__.pop("_memplan_node", None)  # of an earlier recording's graph
        for fqn, param in self._module.named_parameters():
            slot = self._slot(fqn, param, Role.PARAM, owners)
            self._params.append(slot)
            self._trainable.append(param if param.requires_grad else None)
        for fqn, buffer in self._module.named_buffers():
            self._buffers.append(self._slot(fqn, buffer, Role.BUFFER, owners))

    def _slot(self, fqn: str, tensor: torch.Tensor, role: Role, owners: dict[str, int]) -> TensorSlot:
        owner = owners.get(fqn.rpartition(".")[0], 0)
        dtype = str(tensor.dtype).removeprefix("torch.")
        return TensorSlot(fqn, tuple(tensor.shape), dtype, tensor.requires_grad, owner, self._storage_of(tensor, role))

    def _settle_roles(self) -> None:
        """Storages made in a forward (or recompute) that outlive it are activations; the others are temporaries."""
        run = Pass.FORWARD
        born: dict[int, tuple[Pass, bool]] = {}  # storage -> (pass that made it, in a recompute)
        depth = 0
        for kind, arg, aux in zip(self._kind, self._arg, self._aux, strict=True):
            if kind == EventKind.PHASE:
                run = Pass.BACKWARD if arg == Phase.BACKWARD else Pass.FORWARD
            elif kind == EventKind.ENTER and aux == Pass.RECOMPUTE:
                depth += 1
            elif kind == EventKind.LEAVE and aux == Pass.RECOMPUTE:
                depth -= 1
                if depth == 0:  # what a recompute leaves behind is an activation of the block's backward
                    for storage, (_, recomputed) in born.items():
                        if recomputed and self._role[storage] == Role.TEMP:
                            self._role[storage] = Role.ACTIVATION
                    born = {s: b for s, b in born.items() if not b[1]}
            elif kind == EventKind.ALLOC:
                born[arg] = (run, depth > 0)
            elif kind == EventKind.FREE:
                made = born.pop(arg, None)
                if made and made[0] is Pass.FORWARD and run is Pass.BACKWARD and self._role[arg] == Role.TEMP:
                    self._role[arg] = Role.ACTIVATION
        for storage, (made_in, _) in born.items():  # alive at the end: outputs, loss, caches
            if made_in is Pass.FORWARD and self._role[storage] == Role.TEMP:
                self._role[storage] = Role.ACTIVATION


def _info(tensor: torch.Tensor) -> TensorInfo:
    shape = tuple(tensor.shape)
    stride = tuple(s if n != 1 else 0 for s, n in zip(tensor.stride(), shape, strict=True))
    return TensorInfo(str(tensor.dtype).removeprefix("torch."), shape, stride)


def _holds_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or (
        isinstance(value, (list, tuple)) and any(isinstance(v, torch.Tensor) for v in value)
    )


def _flops(func: Any, inputs: Sequence[TensorInfo], args: Any, kwargs: Any, out: Any) -> int:
    """As torch's own counter has it (torch/utils/flop_counter.py); attention as its `sdpa_flop`: masked products count too."""
    name = str(func).rpartition(".")[0]
    if name in _ATTENTION_PRODUCTS:
        query, key = _query_and_key(name, inputs)
        return 2 * query.numel * key.shape[-2] * _ATTENTION_PRODUCTS[name]
    formula = flop_registry.get(func._overloadpacket)
    return int(formula(*args, **kwargs, out_val=out)) if formula else 0


def _query_and_key(name: str, inputs: Sequence[TensorInfo]) -> tuple[TensorInfo, TensorInfo]:
    first = int(name == "memplan.attention_backward")  # the gradient comes before them
    return inputs[first], inputs[first + 1]


def _plain(value: Any) -> Any:
    """A scalar argument as JSON data."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return str(value)


def _tensors_in(value: Any) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors_in(item)
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            yield from _tensors_in(item)
    elif hasattr(value, "__dict__") and not isinstance(value, (type, torch.nn.Module)):
        yield from _tensors_in(vars(value))


def _dense(tensor: torch.Tensor) -> bool:
    """Non-overlapping and dense: a permutation of a contiguous tensor."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _exclusive_reference_counts() -> tuple[int, int]:
    """(storage, tensor) reference counts that a dispatch mode sees for a gradient that only the engine's buffer owns.

    Calibrated on a graph whose answer is known: x feeds exp and sin, so the second gradient is added to a buffer that
    nothing else holds.  The figures depend on the torch version (2 and 4 on 2.13).
    """
    seen: list[tuple[int, int]] = []

    class Probe(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is _ADD and not torch.is_grad_enabled():
                old = args[0]
                seen.append((torch._C._storage_Use_Count(old.untyped_storage()._cdata), old._use_count()))
            if func is _PRIM_DEVICE:
                return args[0].fake_device
            return func(*args, **(kwargs or {}))

    with FakeTensorMode():
        x = torch.ones(2, 3, requires_grad=True)
        with Probe():
            y = x * 2
            (y.exp() * 1).sum().add(y.sin().sum()).backward()
    return seen[-1] if seen else (2, 4)
