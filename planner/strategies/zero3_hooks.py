"""Which parameters a module uses, and whether gradients pass through it: what ZeRO-3's hooks see of a module.

DeepSpeed's backward hooks sit on tensors (deepspeed/runtime/zero/parameter_offload.py, `_register_deepspeed_module`): the one
before a module's backward on its outputs, the one after it on its *positional* inputs, and either is called only where that
tensor carries a gradient.  An embedding's ids carry none, so its parameters are released at the end of backward.

Known limits.  A trace does not say which inputs were positional: a module that has parameters of its own and gets all its
inputs by keyword is taken for one that gets them by position.  A module that is called several times counts as one.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..trace.steptrace import EventKind, Pass, StepTrace, TensorInfo, TensorSlot
from .deepspeed_settings import LeafModules

_PRODUCT_4_BIT = "bitsandbytes.gemm_4bit"
_LINEAR = frozenset({"aten.mm", "aten.addmm", "aten.linear"})  # what `torch.nn.functional.linear` runs


@dataclass(frozen=True, slots=True)
class ModuleUse:
    """By module index of the trace."""

    params: list[list[int]]  # indices of its own parameters, tied ones included, in rising order
    has_input_grad: list[bool]
    has_output_grad: list[bool]
    cut_short: list[bool]  # of every leave in a recompute, in the trace's order: an early stop left it, so no hook is called


def module_use(trace: StepTrace) -> ModuleUse:
    """Follows gradients through the forward pass of the trace."""
    known = trace.worked_out
    if ModuleUse not in known:
        known[ModuleUse] = _module_use(trace)
    found: ModuleUse = known[ModuleUse]
    return found


def _module_use(trace: StepTrace) -> ModuleUse:
    count = len(trace.modules)
    own: list[set[int]] = [set() for _ in range(count)]
    param_of = {p.storage: index for index, p in enumerate(trace.params)}
    for index, param in enumerate(trace.params):
        own[param.module].add(index)
    carries = {p.storage for p in trace.params if p.requires_grad}
    input_grad, output_grad, runs_op = [False] * count, [False] * count, [False] * count
    born_in: dict[int, tuple[int, ...]] = {}  # storage -> the calls that were open
    open_calls: list[int] = []
    starts, inputs = trace.op_input_start.tolist(), trace.op_inputs.tolist()
    module_of = trace.call_module.tolist()
    reads_grad = False
    # checkpoints over a frozen base: the output of the input embedding, the first of a step, is told to carry a gradient
    # (transformers, `enable_input_require_grads`)
    makes_grad = trace.options.get("adapter") is not None and trace.options["recompute"] == "full"
    for kind, arg, aux in trace.events():
        if kind is EventKind.PHASE:
            continue
        if kind is EventKind.ENTER and aux == Pass.FORWARD:
            open_calls.append(arg)
        elif kind is EventKind.LEAVE and aux == Pass.FORWARD:
            open_calls.pop()
        elif kind is EventKind.OP and open_calls and trace.op_pass[arg] == Pass.FORWARD:
            read = inputs[starts[arg] : starts[arg + 1]]
            reads_grad = any(storage in carries for storage in read)
            if makes_grad and trace.signatures[trace.op_signature[arg]].op == "aten.embedding.default":
                reads_grad, makes_grad = True, False
            inner = module_of[open_calls[-1]]
            own[inner].update(param_of[s] for s in read if s in param_of)
            for call in open_calls:
                runs_op[module_of[call]] = True
                output_grad[module_of[call]] |= reads_grad
                for storage in read:
                    if storage in carries and storage not in param_of and call not in born_in.get(storage, ()):
                        input_grad[module_of[call]] = True
        elif kind is EventKind.ALLOC and open_calls:
            born_in[arg] = tuple(open_calls)
            if reads_grad:
                carries.add(arg)
    for module in range(count):
        if not runs_op[module]:  # hands its input on
            output_grad[module] = input_grad[module] = True
    return ModuleUse([sorted(params) for params in own], input_grad, output_grad, _cut_short(trace))


def _cut_short(trace: StepTrace) -> list[bool]:
    """A recompute stops as soon as the last tensor that was saved is there again, by an exception out of all open modules
    (torch/utils/checkpoint.py, `_StopRecomputationError`).  That is seen by what follows: another op than in forward.

    A reentrant recompute runs to its end.
    """
    found: list[bool] = []
    followed_by: dict[int, int] = {}  # module -> signature of the op after it in forward
    left: list[int] = []  # modules left in forward since the last op
    stopped: list[tuple[int, int]] = []  # (place in `found`, module), left in a recompute since the last op
    for kind, arg, aux in trace.events():
        if kind is EventKind.OP:
            signature = int(trace.op_signature[arg])
            followed_by.update(dict.fromkeys(left, signature))
            for place, module in stopped:
                found[place] = followed_by.get(module) != signature
        elif kind is EventKind.LEAVE and aux == Pass.FORWARD:
            left.append(int(trace.call_module[arg]))
            continue
        elif kind is EventKind.LEAVE and aux == Pass.RECOMPUTE:
            stopped.append((len(found), int(trace.call_module[arg])))
            found.append(False)
            continue
        elif kind is EventKind.ENTER and aux == Pass.FORWARD:
            continue  # the op that follows may be inside the next module
        elif kind in (EventKind.ENTER, EventKind.LEAVE) and aux == Pass.BACKWARD:
            for place, _ in stopped:
                found[place] = True
        elif kind is not EventKind.ENTER:
            continue
        left.clear()
        stopped.clear()
    return [False] * len(found) if trace.options.get("reentrant") else found


def leaf_modules(trace: StepTrace, leaves: LeafModules) -> frozenset[int]:
    """The modules that DeepSpeed marks (deepspeed/utils/z3_leaf_module.py, `apply_zero_leaf_module_config`)."""
    classes = {name.rpartition(".")[2] for name in leaves.classes}  # a trace knows a class without its module
    return frozenset(
        index
        for index, module in enumerate(trace.modules)
        if module.class_name in classes
        or module.fqn in leaves.names
        or any(module.fqn.endswith(suffix) for suffix in leaves.name_suffixes)
    )


def inside_of(trace: StepTrace, leaves: frozenset[int]) -> dict[int, int]:
    """Module -> the outermost leaf module that it is, or is a part of."""
    found: dict[int, int] = {}
    outermost = sorted(leaves, key=lambda index: len(trace.modules[index].fqn))
    for leaf in outermost:
        if leaf in found:
            continue
        name = trace.modules[leaf].fqn
        for index, module in enumerate(trace.modules):
            if index == leaf or not name or module.fqn.startswith(name + "."):
                found.setdefault(index, leaf)
    return found


def with_children(trace: StepTrace, own: list[list[int]]) -> list[list[int]]:
    """By module: its own parameters and those of all that is inside of it, in rising order."""
    found: list[set[int]] = [set(params) for params in own]
    index_of = {module.fqn: index for index, module in enumerate(trace.modules)}
    for index, params in enumerate(own):
        name = trace.modules[index].fqn
        while name:
            name = name.rpartition(".")[0]
            if (outer := index_of.get(name)) is not None:
                found[outer].update(params)
    return [sorted(params) for params in found]


def saved_as_views(
    trace: StepTrace, leaf_of: dict[int, int], *, memory_efficient_linear: bool = True
) -> frozenset[tuple[int, int]]:
    """The (module, parameter) where autograd saves a view in forward: it holds the gathered storage until the backward has
    used it, and a release leaves that in place.  Parts of a leaf module (`leaf_of`) count as the leaf.

    Only ops whose backward reads the parameter again save it.  `torch.nn.functional.linear` reads a transposed view, but
    DeepSpeed replaces it by a function that saves the parameter itself (deepspeed/runtime/zero/linear.py), and a parameter
    that is saved itself is released with its storage.  `memory_efficient_linear`: whether it is replaced.
    """
    index_of = {p.storage: index for index, p in enumerate(trace.params)}
    starts, inputs = trace.op_input_start.tolist(), trace.op_inputs.tolist()
    viewed: set[tuple[int, int]] = set()
    read_again: set[int] = set()
    for op, (signature, kind) in enumerate(zip(trace.op_signature.tolist(), trace.op_pass.tolist(), strict=True)):
        storages = inputs[starts[op] : starts[op + 1]]
        used = [(place, index_of[storage]) for place, storage in enumerate(storages) if storage in index_of]
        if kind == Pass.BACKWARD:
            read_again.update(index for _, index in used)
        elif kind == Pass.FORWARD:
            said = trace.signatures[signature]
            name = said.op.rpartition(".")[0] or said.op
            for place, index in used:
                if place < len(said.inputs) and _is_view(said.inputs[place], trace.params[index]):
                    linear = name in _LINEAR and _is_transposed(said.inputs[place], trace.params[index])
                    if not (linear and memory_efficient_linear):
                        module = int(trace.call_module[trace.op_call[op]])
                        viewed.add((leaf_of.get(module, module), index))
    return frozenset((module, index) for module, index in viewed if index in read_again)


def is_packed(trace: StepTrace, param: TensorSlot) -> bool:
    """Whether bitsandbytes' 4-bit weights lie in `param`, which is of another dtype than the model then."""
    return trace.modules[param.module].class_name == "Linear4bit" and param.shape[1:] == (1,)


def kept_by_products(trace: StepTrace) -> frozenset[tuple[int, int]]:
    """The (module, parameter) of 4-bit weights that a product needs again in backward: the graph of the loss holds them.

    bitsandbytes keeps a view of the packed weight as an attribute of its autograd node (0.50.2, autograd/_functions.py,
    `MatMul4Bit.forward`, `ctx.tensors`), not among the tensors that autograd saves: it goes with the graph, and a checkpoint
    that is not reentrant does not drop it.
    """
    index_of = {p.storage: index for index, p in enumerate(trace.params)}
    starts, inputs = trace.op_input_start.tolist(), trace.op_inputs.tolist()
    packed: set[tuple[int, int]] = set()
    read_again: set[int] = set()
    for op, (signature, kind) in enumerate(zip(trace.op_signature.tolist(), trace.op_pass.tolist(), strict=True)):
        used = [index_of[storage] for storage in inputs[starts[op] : starts[op + 1]] if storage in index_of]
        if kind == Pass.BACKWARD:
            read_again.update(used)
        elif kind == Pass.FORWARD and trace.signatures[signature].op.startswith(_PRODUCT_4_BIT):
            module = int(trace.call_module[trace.op_call[op]])
            packed.update((module, index) for index in used if is_packed(trace, trace.params[index]))
    return frozenset((module, index) for module, index in packed if index in read_again)


def _is_view(seen: TensorInfo, param: TensorSlot) -> bool:
    return seen.shape != param.shape or seen.stride != _strides(param.shape)


def _is_transposed(seen: TensorInfo, param: TensorSlot) -> bool:
    return _is_view(seen, param) and seen.shape == param.shape[::-1]


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of a contiguous tensor, as `TensorInfo` writes them: 0 for a dimension of size 1."""
    found: list[int] = []
    step = 1
    for size in reversed(shape):
        found.append(step if size != 1 else 0)
        step *= size
    return tuple(reversed(found))


@dataclass(frozen=True, slots=True)
class KeptInputs:
    """Inputs of frozen Linears.  torch saves none of them, as only a weight's gradient needs one; the function that DeepSpeed
    puts in the place of `torch.nn.functional.linear` saves its input whatever is frozen (zero/linear.py)."""

    at: dict[int, tuple[int, ...]]  # module event, counted from the beginning -> storages that have just gone in the trace
    done_by: dict[int, tuple[int, ...]]  # module -> storages whose last backward it runs


def kept_inputs(trace: StepTrace) -> KeptInputs:
    """What the trace frees before the backward of a frozen Linear that would save it."""
    frozen = {p.storage: index for index, p in enumerate(trace.params) if not p.requires_grad}
    at: dict[int, list[int]] = {}
    done_by: dict[int, list[int]] = {}
    if not frozen:
        return KeptInputs({}, {})
    starts, inputs = trace.op_input_start.tolist(), trace.op_inputs.tolist()
    read_again = {s for op, kind in enumerate(trace.op_pass.tolist()) if kind == Pass.BACKWARD
                  for s in inputs[starts[op] : starts[op + 1]] if s in frozen}  # fmt: skip
    again = recomputed_modules(trace)
    waiting: dict[int, set[int]] = {}  # storage -> Linears that have saved it
    kept: dict[int, set[int]] = {}
    last_left: dict[int, int] = {}  # module -> its place in the order of backward
    count = 0
    for kind, arg, aux in trace.events():
        if kind is EventKind.ENTER:
            count += 1
        elif kind is EventKind.LEAVE:
            count += 1
            if aux == Pass.BACKWARD:
                for modules in waiting.values():
                    modules.discard(int(trace.call_module[arg]))
        elif kind is EventKind.OP and trace.op_pass[arg] in (Pass.FORWARD, Pass.RECOMPUTE):
            said = trace.signatures[trace.op_signature[arg]]
            storages = inputs[starts[arg] : starts[arg + 1]]
            module = int(trace.call_module[trace.op_call[arg]])
            if said.op.rpartition(".")[0] not in _LINEAR or (trace.op_pass[arg] == Pass.FORWARD and module in again):
                continue
            for place, storage in enumerate(storages):
                if storage in read_again and _is_transposed(said.inputs[place], trace.params[frozen[storage]]):
                    waiting.setdefault(storages[place - 1], set()).add(module)
        elif kind is EventKind.FREE and (modules := waiting.pop(arg, set())):
            at.setdefault(count, []).append(arg)
            kept[arg] = modules
    for kind, arg, aux in trace.events():  # which module's backward is the last to need each
        if kind is EventKind.LEAVE and aux == Pass.BACKWARD:
            last_left[int(trace.call_module[arg])] = len(last_left)
    for storage, modules in kept.items():
        done_by.setdefault(max(modules, key=lambda module: last_left.get(module, -1)), []).append(storage)
    return KeptInputs({k: tuple(v) for k, v in at.items()}, {k: tuple(v) for k, v in done_by.items()})


def recomputed_modules(trace: StepTrace) -> frozenset[int]:
    """Modules that run again in backward: their first run saves nothing."""
    return frozenset(
        int(trace.call_module[arg]) for kind, arg, aux in trace.events() if kind is EventKind.ENTER and aux == Pass.RECOMPUTE
    )
