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

import bisect
import contextlib
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

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
# The real kernels give grad_input the input's shape, contiguous (layer_norm_kernel.cu, layer_norm.cpp: empty_like with
# LEGACY_CONTIGUOUS); the fake one keeps the gradient's strides.
_CONTIGUOUS_FIRST_OUTPUT = {aten.native_layer_norm_backward.default, aten._fused_rms_norm_backward.default}
_ENGINE = torch.autograd.graph._engine_run_backward.__code__
_ACCUMULATE_GRAD = 2**64 - 1  # the sequence number of AccumulateGrad nodes: they run as soon as they can
_VIEW_FREE = 0
_NEVER_CACHED = {aten.lift_fresh.default, aten.lift_fresh_copy.default, aten._to_copy.default, aten.scalar_tensor.default}
_WITHOUT_DISPATCH = torch._C._DisableTorchDispatch
_GROUPED_MM = aten._grouped_mm.default


@dataclass(slots=True)
class _Arguments:
    """The arguments of one op: its tensors, what tells it from other ops (None: cannot be hashed), and their fx form."""

    inputs: list[torch.Tensor]
    key: Any
    node_args: tuple[Any, ...]
    node_kwargs: dict[str, Any]


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
        self._mode = mode
        self._results: dict[Any, Any] = {}  # arguments -> what to make, for ops whose outputs are new tensors
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
        self._calls = _Calls(module, self._emit, self.storages)
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
            out = self._run(func, args, kwargs, read)
        except Exception:
            self._failed_in = self._calls.running_fqn()  # the hooks that see the exception pass leave the modules
            raise
        self._record(func, args, kwargs, read, out, node_sequence)
        self._shadows.follow(func, args, kwargs, out)
        return out

    def _run(self, func: Any, args: Any, kwargs: Any, read: _Arguments) -> Any:
        """The fake result of an op.

        The fake mode spends most of its time on finding an op's result in its own cache.  Two kinds of ops need none of that:
        one seen before with the same arguments, whose outputs are all new tensors, and a view, which its kernel answers.
        """
        out: Any
        made = self._results.get(read.key) if read.key is not None else None
        if made is not None:
            device, single, infos = made
            fresh = [self._new_fake(info, device) for info in infos]
            return fresh[0] if single else tuple(fresh)
        if (
            func.is_view
            and not kwargs
            and read.inputs
            and all(isinstance(t, FakeTensor) and t.constant is None for t in read.inputs)
        ):
            with in_kernel_invocation_manager(self._mode):
                out = func(*args)
            if isinstance(out, torch.Tensor):
                return FakeTensor(self._mode, out, read.inputs[0].fake_device)  # type: ignore[attr-defined]
            return [FakeTensor(self._mode, t, read.inputs[0].fake_device) for t in out]  # type: ignore[attr-defined]
        out = _fake_grouped_mm(args, kwargs) if func is _GROUPED_MM else self._mode.dispatch(func, (), args, kwargs)
        if func in _CONTIGUOUS_FIRST_OUTPUT and out[0] is not None and not out[0].is_contiguous():
            out = (torch.empty_like(out[0], memory_format=torch.contiguous_format), *out[1:])
        if read.key is not None and func not in _NEVER_CACHED and not func._schema.is_mutable:
            self._remember(read, out)
        return out

    def _remember(self, read: _Arguments, out: Any) -> None:
        outputs = [out] if isinstance(out, torch.Tensor) else out
        if not isinstance(outputs, (list, tuple)) or isinstance(out, list) or not outputs:
            return
        for tensor in outputs:
            if (
                not isinstance(tensor, FakeTensor)
                or tensor.constant is not None
                or tensor.storage_offset()
                or tensor.layout is not torch.strided
            ):
                return
            if tensor.untyped_storage()._cdata in self._live or tensor.is_conj() or tensor.is_neg():
                return
        if any(getattr(t, "constant", None) is not None for t in read.inputs):
            return
        if len({t.untyped_storage()._cdata for t in outputs}) < len(outputs):
            return
        infos = [(tuple(t.shape), t.stride(), t.dtype, t.untyped_storage().nbytes()) for t in outputs]
        if any(nbytes != _dense_bytes(*info[:2], info[2].itemsize) for info in infos for nbytes in info[3:]):
            return
        self._results[read.key] = (outputs[0].fake_device, isinstance(out, torch.Tensor), infos)

    def _new_fake(self, info: Any, device: torch.device) -> torch.Tensor:
        shape, stride, dtype, _ = info
        with _WITHOUT_DISPATCH():
            meta = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        return FakeTensor(self._mode, meta, device)

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

    def _read_arguments(self, func: Any, args: Any, kwargs: Any) -> _Arguments:
        inputs: list[torch.Tensor] = []
        key: list[Any] = [func]
        node_args = tuple([self._argument(a, inputs, key) for a in args])
        node_kwargs = {k: self._argument(v, inputs, key, k) for k, v in kwargs.items()}
        fixed = tuple(key)
        try:
            hash(fixed)
        except TypeError:  # an unhashable argument (a Generator, a nested list)
            return _Arguments(inputs, None, node_args, node_kwargs)
        return _Arguments(inputs, fixed, node_args, node_kwargs)

    def _record(self, func: Any, args: Any, kwargs: Any, read: _Arguments, out: Any, node_sequence: int) -> None:
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

    def _signature(self, func: Any, read: _Arguments, outputs: list[Any], args: Any, kwargs: Any, out: Any) -> int:
        found = self._signature_index.get(read.key) if read.key is not None else None
        if found is not None:
            return found
        formula = flop_registry.get(func._overloadpacket)
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
                flops=int(formula(*args, **kwargs, out_val=out)) if formula else 0,
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
            copied = self._birth_node[storage] == _ACCUMULATE_GRAD
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


class _Calls:
    """Which module runs: in forward from module hooks, in backward from the sequence numbers of autograd nodes.

    A module call that entered at sequence number s0 and left at s1 made exactly the nodes s0 <= n < s1, and the engine runs
    nodes in falling order of n.  So in backward a call is entered before the first node below s1 and left before the first
    node below s0: the forward's markers, walked backwards, with the calls that made no node in their right place.
    """

    def __init__(self, module: torch.nn.Module, emit: Callable[..., None], storages: Callable[[Any], tuple[int, ...]]) -> None:
        self.root_output: tuple[int, ...] = ()  # storages of what the root module returned last
        self._storages = storages
        self.modules: dict[str, str] = {}
        self._index: dict[int, int] = {}
        for fqn, child in module.named_modules():
            self._index[id(child)] = len(self.modules)
            self.modules[fqn] = type(child).__name__
        self._emit = emit
        self.call_module: list[int] = []
        self.call_parent: list[int] = []
        self._stack: list[int] = []
        self.in_backward = False
        self._markers: list[tuple[int, int, bool]] = []  # (sequence number, call, enters)
        self._owner_from: list[int] = [0]  # sequence numbers at which the running call changes ...
        self._owner: list[int] = [-1]  # ... and the call that runs from there
        self._cursor = -1
        self._floor = 0
        self._outer: list[tuple[int, int]] = []  # saved (cursor, floor) while a nested backward walks its own markers
        self._pending: tuple[int, int] | None = None  # (first marker, first sequence number) of a recompute just done

    def install(self) -> list[Any]:
        hooks = torch.nn.modules.module
        return [
            hooks.register_module_forward_pre_hook(self._enter),
            hooks.register_module_forward_hook(self._leave, always_call=True),
        ]

    def _enter(self, module: torch.nn.Module, _: Any) -> None:
        index = self._index.get(id(module))
        if index is None:
            return
        sequence = torch.autograd._get_sequence_nr()
        if self.in_backward and not self._stack:
            self.running_node()  # the calls that the node entered come before its recompute
            self._pending = (len(self._markers), sequence)
        call = len(self.call_module)
        self.call_module.append(index)
        self.call_parent.append(self._stack[-1] if self._stack else -1)
        self._stack.append(call)
        self._mark(sequence, call, True)
        self._emit(EventKind.ENTER, call, Pass.RECOMPUTE if self.in_backward else Pass.FORWARD)

    def _leave(self, module: torch.nn.Module, _: Any, output: Any) -> None:
        if id(module) not in self._index or not self._stack:
            return
        call = self._stack.pop()
        if not self._stack and not self.in_backward:
            self.root_output = self._storages(output)
        self._mark(torch.autograd._get_sequence_nr(), call, False)
        self._emit(EventKind.LEAVE, call, Pass.RECOMPUTE if self.in_backward else Pass.FORWARD)

    def running_fqn(self) -> str:
        if not self._stack:
            return ""
        return list(self.modules)[self.call_module[self._stack[-1]]]

    def _mark(self, sequence: int, call: int, enters: bool) -> None:
        self._markers.append((sequence, call, enters))
        running = self._stack[-1] if self._stack else -1
        if self._owner_from[-1] == sequence:
            self._owner[-1] = running
        else:
            self._owner_from.append(sequence)
            self._owner.append(running)

    def start_backward(self) -> None:
        self._cursor, self._floor = len(self._markers) - 1, 0

    def running_node(self) -> int:
        """The sequence number of the autograd node that runs (-1: none), after entering and leaving calls up to it."""
        if self._stack:  # a recompute runs inside backward: its ops are forward ops
            return -1
        node = torch._C._current_autograd_node()
        if node is None:
            return -1
        sequence = int(node._sequence_nr())
        if sequence != _ACCUMULATE_GRAD:
            self._walk_to(sequence)
        return sequence

    def _walk_to(self, sequence: int) -> None:
        if self._pending is not None:
            first, start = self._pending
            self._pending = None
            if sequence >= start:  # a nested backward over the recomputed graph (reentrant checkpoint)
                self._outer.append((self._cursor, self._floor))
                self._cursor, self._floor = len(self._markers) - 1, first
        while True:
            while self._cursor >= self._floor and self._markers[self._cursor][0] > sequence:
                self._reverse(self._markers[self._cursor])
                self._cursor -= 1
            if not self._outer or self._cursor >= self._floor or sequence >= self._markers[self._floor][0]:
                return
            self._cursor, self._floor = self._outer.pop()

    def _reverse(self, marker: tuple[int, int, bool]) -> None:
        _, call, entered = marker
        self._emit(EventKind.LEAVE if entered else EventKind.ENTER, call, Pass.BACKWARD)

    def finish_backward(self) -> None:
        """Leaves the calls that the last node was inside of."""
        if not self.in_backward:
            return
        while True:
            while self._cursor >= self._floor:
                self._reverse(self._markers[self._cursor])
                self._cursor -= 1
            if not self._outer:
                return
            self._cursor, self._floor = self._outer.pop()

    def position(self, node_sequence: int, in_backward: bool) -> tuple[int, Pass]:
        """(call, pass) of the op being recorded."""
        if not in_backward:
            return (self._stack[-1] if self._stack else -1), Pass.FORWARD
        if self._stack:
            return self._stack[-1], Pass.RECOMPUTE
        if node_sequence in (-1, _ACCUMULATE_GRAD):
            return self._last, Pass.BACKWARD
        self._last = self._owner[bisect.bisect_right(self._owner_from, node_sequence) - 1]
        return self._last, Pass.BACKWARD

    _last = -1


def _info(tensor: torch.Tensor) -> TensorInfo:
    shape = tuple(tensor.shape)
    stride = tuple(s if n != 1 else 0 for s, n in zip(tensor.stride(), shape, strict=True))
    return TensorInfo(str(tensor.dtype).removeprefix("torch."), shape, stride)


def _fake_grouped_mm(args: Any, kwargs: Any) -> torch.Tensor:
    """The output of `_grouped_mm`, whose meta function takes bf16 only although the kernels take fp32 and fp16 too.

    2-d x 3-d (rows split among the experts) -> [rows, n]; 2-d x 2-d (the weights' gradient) -> [experts, m, n];
    3-d x 2-d -> [m, cols].  Rows are padded to 16 bytes (torch/_meta_registrations.py, _create_grouped_mm_output_tensor).
    """
    names = ("self", "mat2", "offs", "bias", "out_dtype")
    given: dict[str, Any] = {**dict(zip(names, args, strict=False)), **kwargs}
    a, b, offs, out_dtype = given["self"], given["mat2"], given["offs"], given.get("out_dtype")
    size: tuple[int, ...]
    if a.dim() == 2 and b.dim() == 2:
        size = (offs.size(0), a.size(0), b.size(1))
    elif a.dim() == 2:
        size = (a.size(0), b.size(-1))
    elif b.dim() == 2:
        size = (a.size(1), b.size(1))
    else:
        size = (a.size(0), a.size(1), b.size(-1))
    dtype = out_dtype or a.dtype
    per_row = 16 // dtype.itemsize
    padded = -(-size[-1] // per_row) * per_row
    strides = (size[1] * padded, padded, 1)[-len(size) :]
    return a.new_empty(0, dtype=dtype).new_empty_strided(size, strides)


def _holds_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or (
        isinstance(value, (list, tuple)) and any(isinstance(v, torch.Tensor) for v in value)
    )


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


def _dense_bytes(shape: tuple[int, ...], stride: tuple[int, ...], itemsize: int) -> int:
    """Bytes that `empty_strided` allocates."""
    if 0 in shape:
        return 0
    return (1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))) * itemsize


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
