"""What the recorder writes is what a real step on the CPU allocates and frees, in the same order, byte for byte."""

from __future__ import annotations

import textwrap
from collections import Counter
from typing import Any

import pytest
import torch
from memplan.errors import CannotTell, UserError
from memplan.models import ModelSpec, build, load
from memplan.planner.trace.options import TraceOptions
from memplan.planner.trace.steptrace import EventKind, Pass, Phase, Role, StepTrace
from memplan.planner.trace.tracer import trace_step
from memplan.validator.cpu import _scratch, leaf_outputs, parse

HEAD = """
    import torch
    from torch import nn
    from torch.nn import functional as F
    from torch.utils.checkpoint import checkpoint

    class Net(nn.Module):
    BODY

    def build(**kwargs):
        return Net(), lambda batch, seq: BATCH, lambda m, b: LOSS
"""
X = '{"x": torch.ones(batch, 12)}'
IDS = '{"x": torch.arange(batch * seq).view(batch, seq) % 11}'

# name -> (body of the module, batch, loss)
STEPS: dict[str, tuple[str, str, str]] = {
    "linear layers": (
        """
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(12, 40), nn.ReLU(), nn.Linear(40, 12), nn.LayerNorm(12), nn.GELU())
        def forward(self, x):
            return self.layers(x)
        """, X, "m(**b).sum()",
    ),
    "a language model with tied weights": (
        """
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(11, 12)
            self.head = nn.Linear(12, 11, bias=False)
            self.head.weight = self.embed.weight
        def forward(self, x):
            return self.head(torch.tanh(self.embed(x)))
        """, IDS, "F.cross_entropy(m(**b).flatten(0, 1), b['x'].flatten())",
    ),
    "a frozen layer in the middle": (
        """
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(12, 20), nn.Linear(20, 20), nn.Linear(20, 12)
            self.b.requires_grad_(False)
        def forward(self, x):
            return self.c(torch.relu(self.b(torch.relu(self.a(x)))))
        """, X, "m(**b).mean()",
    ),
    "frozen first layers": (
        """
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(12, 20), nn.Linear(20, 20), nn.Linear(20, 12)
            self.a.requires_grad_(False)
            self.b.requires_grad_(False)
        def forward(self, x):
            return self.c(torch.relu(self.b(torch.relu(self.a(x)))))
        """, X, "m(**b).mean()",
    ),
    "a module called twice": (
        """
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(12, 12)
        def forward(self, x):
            return self.a(torch.relu(self.a(x)))
        """, X, "m(**b).sum()",
    ),
    "a tensor with two consumers": (
        """
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(12, 12)
        def forward(self, x):
            h = self.a(x)
            return h.exp() * h.sin()
        """, X, "m(**b).sum()",
    ),
    "a tensor with three consumers": (
        """
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(12, 12)
        def forward(self, x):
            h = self.a(x)
            return h.exp() + h.sin() * h.cos()
        """, X, "m(**b).sum()",
    ),
    "residual connections": (
        """
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(12, 12), nn.Linear(12, 12)
        def forward(self, x):
            x = x + self.a(x)
            return x + self.b(torch.tanh(x))
        """, X, "m(**b).sum()",
    ),
    "query, key and value of one tensor": (
        """
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v, self.o = (nn.Linear(12, 12) for _ in range(4))
        def forward(self, x):
            h = torch.tanh(self.o(x))
            return torch.softmax(self.q(h) @ self.k(h).T, -1) @ self.v(h)
        """, X, "m(**b).sum()",
    ),
    "einsum with a weight": (
        """
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(20, 12))
            self.u = nn.Parameter(torch.ones(3, 20, 5))
        def forward(self, x):
            return torch.einsum('gok,bo->bgk', self.u, torch.einsum('bi,oi->bo', x, self.w))
        """, X, "m(**b).sum()",
    ),
    "a gradient that comes transposed": (
        """
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(4, 12, 7))
        def forward(self, x):
            return torch.bmm(self.w.transpose(1, 2), x.T.unsqueeze(0).expand(4, -1, -1))
        """, X, "m(**b).sum()",
    ),
    "indexing": (
        """
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.ones(11, 12))
        def forward(self, x):
            return self.table[x].tanh()
        """, IDS, "m(**b).sum()",
    ),
    "maximum, sort and gather": (
        """
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(12, 12)
        def forward(self, x):
            h = self.a(x)
            top = h.max(-1).values
            ordered = h.sort(-1).values
            return (h - top[:, None]) * ordered.gather(1, torch.zeros(h.shape[0], 1, dtype=torch.int64))
        """, X, "m(**b).sum()",
    ),
    "slices and concatenation": (
        """
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(12, 24)
        def forward(self, x):
            up, gate = self.a(x).chunk(2, -1)
            return torch.cat([up * torch.sigmoid(gate), gate[:, :3]], -1)
        """, X, "m(**b).sum()",
    ),
    "in place": (
        """
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(12, 12), nn.Linear(12, 12)
        def forward(self, x):
            h = self.a(x).relu_()
            return self.b(h).add_(x)
        """, X, "m(**b).sum()",
    ),
    "buffers": (
        """
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(12, 12)
            self.register_buffer("scale", torch.ones(12))
            self.register_buffer("count", torch.zeros(()))
            self.register_buffer("one", torch.ones(()))
        def forward(self, x):
            self.count += self.one
            return self.a(x) * self.scale
        """, X, "m(**b).sum()",
    ),
    "non-reentrant checkpoint": (
        """
        def __init__(self):
            super().__init__()
            self.block = nn.Sequential(nn.Linear(12, 30), nn.ReLU(), nn.Linear(30, 12))
        def forward(self, x):
            x = checkpoint(self.block, x, use_reentrant=False, preserve_rng_state=False)
            return checkpoint(self.block, x, use_reentrant=False, preserve_rng_state=False)
        """, X, "m(**b).sum()",
    ),
    "reentrant checkpoint": (
        """
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(12, 12)
            self.block = nn.Sequential(nn.Linear(12, 30), nn.ReLU(), nn.Linear(30, 12))
        def forward(self, x):
            x = checkpoint(self.block, self.first(x), use_reentrant=True, preserve_rng_state=False)
            return checkpoint(self.block, x, use_reentrant=True, preserve_rng_state=False)
        """, X, "m(**b).sum()",
    ),
    "a function with its own backward": (
        """
        class Cube(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.save_for_backward(x, x * x)
                return x * x * x
            @staticmethod
            def backward(ctx, g):
                x, square = ctx.saved_tensors
                return (square + x) * g
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(12, 12)
        def forward(self, x):
            return self.Cube.apply(self.a(x))
        """, X, "m(**b).sum()",
    ),
    "a parameter that is used twice and in two ways": (
        """
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(12, 12))
        def forward(self, x):
            return (x @ self.w) * torch.diagonal(self.w) + self.w.sum()
        """, X, "m(**b).sum()",
    ),
    "an unused parameter": (
        """
        def __init__(self):
            super().__init__()
            self.a, self.unused = nn.Linear(12, 12), nn.Linear(12, 50)
        def forward(self, x):
            return self.a(x)
        """, X, "m(**b).sum()",
    ),
    "part under no_grad, part detached": (
        """
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(12, 12), nn.Linear(12, 12)
        def forward(self, x):
            with torch.no_grad():
                x = torch.relu(self.a(x))
            h = self.b(x)
            return h * h.detach().exp()
        """, X, "m(**b).sum()",
    ),
    "outputs in a dictionary": (
        """
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(12, 12), nn.Linear(12, 30)
        def forward(self, x):
            h = self.a(x)
            return {"hidden": h, "logits": self.b(h), "list": [h.exp()]}
        """, X, "m(**b)['logits'].sum()",
    ),
}  # fmt: skip


def spec_of(tmp_path, name: str) -> ModelSpec:
    body, batch, loss = STEPS[name]
    code = textwrap.dedent(HEAD).replace("BATCH", batch).replace("LOSS", loss)
    file = tmp_path / "net.py"
    file.write_text(code.replace("BODY", textwrap.indent(textwrap.dedent(body), "    ")))
    return load(f"{file}:build")


def trace_of(tmp_path, name: str, batch: int = 6, seq: int = 5, **options: Any) -> StepTrace:
    return trace_step(spec_of(tmp_path, name), TraceOptions(batch_size=batch, seq_len=seq, target="cpu", **options))


def traced_deltas(trace: StepTrace) -> list[int]:
    sizes = trace.storage_bytes.tolist()
    deltas = []
    for kind, arg, _ in trace.events():
        if kind in (EventKind.ALLOC, EventKind.FREE) and sizes[arg]:
            deltas.append(sizes[arg] if kind is EventKind.ALLOC else -sizes[arg])
    return deltas


def real_deltas(spec: ModelSpec, trace: StepTrace, batch: int = 6, seq: int = 5) -> list[int]:
    """Every allocation and free of torch's CPU allocator in one real step, as its profiler reports them; without what a kernel
    makes and drops inside itself, which no dispatcher sees."""
    built = build(spec, dtype=torch.float32)
    given = built.make_batch(batch, seq)

    def drop(param: torch.Tensor) -> None:
        param.grad = None

    for param in built.module.parameters():
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(drop)
    built.step(built.module, given).backward()  # what the first call makes for good is not part of a step
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        loss = built.step(built.module, given)
        loss.backward()
    profile = parse(profiler.profiler.kineto_results.events())
    del loss
    scratch = _scratch(profile, leaf_outputs(trace), set())
    return [e.delta_bytes for i, e in enumerate(profile.events) if e.delta_bytes and i not in scratch]


@pytest.mark.parametrize("name", STEPS)
def test_a_trace_has_the_events_of_the_real_step(tmp_path, name):
    trace = trace_of(tmp_path, name)
    assert traced_deltas(trace) == real_deltas(spec_of(tmp_path, name), trace)


@pytest.mark.parametrize("name", STEPS)
def test_events_are_well_formed(tmp_path, name):
    trace = trace_of(tmp_path, name)
    born: set[int] = set()
    dead: set[int] = set()
    placed = {slot.storage for slot in (*trace.params, *trace.buffers)} | set(trace.batch_storages)
    starts, inputs = trace.op_input_start.tolist(), trace.op_inputs.tolist()
    made_by = -1
    for kind, arg, aux in trace.events():
        if kind is EventKind.OP:
            made_by = arg
            assert not dead & set(inputs[starts[arg] : starts[arg + 1]]), "an op reads what is gone"
        elif kind is EventKind.ALLOC:
            assert arg not in born | placed
            assert trace.storage_op[arg] == made_by
            born.add(arg)
        elif kind is EventKind.FREE and arg not in trace.batch_storages:
            assert arg in born - dead
            dead.add(arg)
        elif kind is EventKind.GRAD:
            assert trace.storage_role[aux] in (Role.GRAD, Role.GRAD_COPY)
    assert trace.loss_storage in born - dead


@pytest.mark.parametrize("name", STEPS)
def test_every_trainable_parameter_that_is_used_gets_its_gradient_once(tmp_path, name):
    trace = trace_of(tmp_path, name)
    handed = Counter(arg for kind, arg, _ in trace.events() if kind is EventKind.GRAD)
    used = {i for i, p in enumerate(trace.params) if p.requires_grad and "unused" not in p.fqn}
    if name == "part under no_grad, part detached":
        used = {i for i in used if trace.params[i].fqn.startswith("b.")}
    assert set(handed) == used
    # a checkpointed block that runs twice hands over once per backward of its own (reentrant), else autograd sums first
    assert set(handed.values()) == ({1, 2} if name == "reentrant checkpoint" else {1})


@pytest.mark.parametrize("name", STEPS)
def test_modules_enter_and_leave_like_brackets(tmp_path, name):
    trace = trace_of(tmp_path, name)
    for wanted in (Pass.FORWARD, Pass.RECOMPUTE, Pass.BACKWARD):
        stack: list[int] = []
        entered: Counter[int] = Counter()
        for kind, arg, aux in trace.events():
            if aux != wanted or kind not in (EventKind.ENTER, EventKind.LEAVE):
                continue
            if kind is EventKind.ENTER:
                stack.append(arg)
                entered[arg] += 1
            else:
                assert stack.pop() == arg
        assert stack == []
        assert set(entered.values()) <= {1}


def calls(trace: StepTrace, wanted: Pass) -> list[str]:
    return [trace.call_fqn(arg) for kind, arg, aux in trace.events() if kind is EventKind.ENTER and aux == wanted]


NO_OP = """
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.before, self.a = nn.Identity(), nn.Linear(12, 12)
            self.drop, self.between, self.b = nn.Dropout(0.0), nn.Sequential(nn.Identity()), nn.Linear(12, 12)
            self.never = nn.Linear(12, 12)

        def forward(self, x):
            return self.b(self.between(self.drop(self.a(self.before(x)))))

    def build():
        return Net(), lambda batch, seq: {"x": torch.ones(batch, 12)}, lambda m, b: m(**b).sum()
"""


def test_a_module_that_runs_no_op_enters_and_leaves_in_forward_and_backward(tmp_path):
    file = tmp_path / "noop.py"
    file.write_text(textwrap.dedent(NO_OP))
    trace = trace_step(load(f"{file}:build"), TraceOptions(batch_size=2, seq_len=1, target="cpu"))
    forward = ["", "before", "a", "drop", "between", "between.0", "b"]
    assert calls(trace, Pass.FORWARD) == forward
    assert sorted(calls(trace, Pass.BACKWARD)) == sorted(forward)
    assert [f for f in calls(trace, Pass.BACKWARD) if f in ("a", "drop", "between", "b")] == ["b", "between", "drop", "a"]


def test_the_ops_of_a_module_lie_between_its_entry_and_its_exit_in_both_passes(tmp_path):
    trace = trace_of(tmp_path, "linear layers")
    open_calls: list[int] = []
    seen = Counter()
    for kind, arg, _ in trace.events():
        if kind is EventKind.ENTER:
            open_calls.append(arg)
        elif kind is EventKind.LEAVE:
            open_calls.pop()
        elif kind is EventKind.OP and trace.fqn_of_op[arg].startswith("layers."):
            assert open_calls[-1] == trace.op_call[arg]
            seen[trace.fqn_of_op[arg], int(trace.op_pass[arg])] += 1
    assert {fqn for fqn, run in seen if run == Pass.BACKWARD} == {f"layers.{i}" for i in range(5)}


@pytest.mark.parametrize(
    ("name", "last"),
    [("non-reentrant checkpoint", ["block.0", "block.1"]), ("reentrant checkpoint", ["block.0", "block.1", "block.2"])],
)
def test_a_recompute_is_told_from_a_forward_and_leaves_activations(tmp_path, name, last):
    trace = trace_of(tmp_path, name)
    assert calls(trace, Pass.RECOMPUTE) == ["block", "block.0", "block.1", "block.2"] * 2
    again = [op for op, run in enumerate(trace.op_pass.tolist()) if run == Pass.RECOMPUTE]
    # the non-reentrant kind stops as soon as all that backward asks for is there: before the last product
    assert [trace.fqn_of_op[op] for op in again] == last * 2
    recomputed = [s for s, op in enumerate(trace.storage_op.tolist()) if op in again and trace.fqn_of_op[op] != "block.2"]
    kept = [s for s in recomputed if trace.storage_role[s] == Role.ACTIVATION]
    assert trace.storage_bytes[kept].tolist() == [6 * 30 * 4] * 2  # relu's output; its input is needed by nobody


def test_tied_parameters_are_one(tmp_path):
    trace = trace_of(tmp_path, "a language model with tied weights")
    assert [p.fqn for p in trace.params] == ["embed.weight"]
    assert trace.num_params == 11 * 12


def test_frozen_parameters_are_known_and_get_no_gradient(tmp_path):
    trace = trace_of(tmp_path, "linear layers", frozen=("layers.0",))
    assert [p.fqn for p in trace.params if not p.requires_grad] == ["layers.0.weight", "layers.0.bias"]
    handed = {trace.params[arg].fqn for kind, arg, _ in trace.events() if kind is EventKind.GRAD}
    assert handed == {"layers.2.weight", "layers.2.bias", "layers.3.weight", "layers.3.bias"}


def test_a_gradient_in_another_layout_is_a_copy_that_only_a_missing_gradient_needs(tmp_path):
    trace = trace_of(tmp_path, "a gradient that comes transposed")
    (storage,) = [aux for kind, _, aux in trace.events() if kind is EventKind.GRAD]
    assert trace.storage_role[storage] == Role.GRAD_COPY


def test_roles_follow_lifetimes(tmp_path):
    trace = trace_of(tmp_path, "linear layers")
    phase_of: dict[int, Phase] = {}
    phase = Phase.FORWARD
    freed_in: dict[int, Phase] = {}
    for kind, arg, _ in trace.events():
        if kind is EventKind.PHASE:
            phase = Phase(arg)
        elif kind is EventKind.ALLOC:
            phase_of[arg] = phase
        elif kind is EventKind.FREE:
            freed_in[arg] = phase
    for storage, born in phase_of.items():
        outlives = freed_in.get(storage, Phase.STEP) is not Phase.FORWARD
        role = Role(int(trace.storage_role[storage]))
        if born is Phase.FORWARD:
            assert role is (Role.ACTIVATION if outlives else Role.TEMP)
        else:
            assert role in (Role.TEMP, Role.GRAD, Role.GRAD_COPY)


def test_the_outputs_are_those_of_the_root_module(tmp_path):
    trace = trace_of(tmp_path, "outputs in a dictionary")
    assert sorted(trace.storage_bytes[list(trace.output_storages)].tolist()) == [6 * 12 * 4, 6 * 12 * 4, 6 * 30 * 4]


def test_flops_are_those_of_the_matrix_products(tmp_path):
    # forward 2 b i o a layer; backward as much for the weight, and for the input of all but the first
    trace = trace_of(tmp_path, "linear layers")
    product = 2 * 6 * 12 * 40
    assert trace.flops == product * 2 + product * 2 + product


def test_the_graph_names_every_op_of_the_trace(tmp_path):
    trace = trace_of(tmp_path, "linear layers")
    ops = [node.meta["op"] for node in trace.graph.nodes if "op" in node.meta]
    assert ops == list(range(trace.num_ops))


def test_recording_leaves_no_hook_and_no_library_behind(tmp_path):
    from torch.nn.modules import module as hooks

    before = (len(hooks._global_forward_hooks), len(hooks._global_forward_pre_hooks))
    for target in ("cpu", "cuda"):
        trace_step(spec_of(tmp_path, "linear layers"), TraceOptions(batch_size=2, seq_len=1, target=target))
    assert (len(hooks._global_forward_hooks), len(hooks._global_forward_pre_hooks)) == before
    x = torch.ones(4, 4)
    assert torch.nn.functional.rms_norm(x, (4,)).shape == (4, 4)
    assert torch.nn.functional.dropout(x, 0.0, True) is not None


# -- what cannot be recorded -----------------------------------------------------------------------------------------------

FAILING = """
    import torch
    from torch import nn

    class Gate(nn.Module):
        def __init__(self, how):
            super().__init__()
            self.how, self.linear = how, nn.Linear(12, 12)

        def forward(self, x):
            h = self.linear(x)
            if self.how == "branch":
                return h if h.sum() > 0 else -h
            if self.how == "item":
                return h * h.max().item()
            if self.how == "nonzero":
                return h[h > 0]
            if self.how == "raises":
                raise ValueError("two words")
            if self.how == "shapes":
                return h @ torch.ones(5, 5)
            if self.how == "exits":
                raise SystemExit(3)
            if self.how == "no loss":
                return h.detach()
            return h

    class Net(nn.Module):
        def __init__(self, how):
            super().__init__()
            self.gate = Gate(how)

        def forward(self, x):
            return self.gate(x)

    def build(how=""):
        return Net(how), lambda batch, seq: {"x": torch.ones(batch, 12)}, lambda m, b: m(**b).sum()
"""


def failing(tmp_path, how: str) -> StepTrace:
    file = tmp_path / "failing.py"
    file.write_text(textwrap.dedent(FAILING))
    return trace_step(load(f"{file}:build", overrides={"how": how}), TraceOptions(batch_size=2, seq_len=1, target="cpu"))


@pytest.mark.parametrize("how", ["branch", "item", "nonzero"])
def test_a_step_that_decides_by_values_cannot_be_told_and_names_the_module(tmp_path, how):
    with pytest.raises(CannotTell, match="gate"):
        failing(tmp_path, how)


@pytest.mark.parametrize(("how", "said"), [("raises", "ValueError: two words"), ("shapes", "RuntimeError")])
def test_an_error_of_the_users_model_is_one_sentence_with_its_own_words(tmp_path, how, said):
    with pytest.raises(UserError, match=said) as caught:
        failing(tmp_path, how)
    assert "failing.py:" in str(caught.value)  # where
    assert "\n" not in str(caught.value)


def test_a_loss_without_gradient_is_the_users_mistake(tmp_path):
    with pytest.raises(UserError, match="no trainable parameter"):
        failing(tmp_path, "no loss")


def test_a_failed_trace_leaves_the_next_one_whole(tmp_path):
    for how in ("raises", "branch"):
        with pytest.raises((UserError, CannotTell)):
            failing(tmp_path, how)
    assert failing(tmp_path, "").num_ops > 0
