"""A trace made deep equals a trace of the deep model, column by column; what cannot be made deep is traced as it is."""

from __future__ import annotations

import textwrap
from dataclasses import replace

import pytest
import torch
from memplan.models import load
from memplan.planner.api import make_request
from memplan.planner.request import Request
from memplan.planner.trace.depth import deepen, same_structure
from memplan.planner.trace.options import TraceOptions
from memplan.planner.trace.source import TraceSource, trace_options
from memplan.planner.trace.stacks import NotPeriodic, Stack, find_stacks
from memplan.planner.trace.steptrace import StepTrace
from memplan.planner.trace.tracer import stacks_of, trace_step


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMPLAN_CACHE", str(tmp_path / "cache"))


# Widths cost nothing in a trace; only the number of blocks is made small.
MODELS = {
    "llama": ("meta-llama/Llama-3.1-8B", {"num_hidden_layers": "7"}),
    "gemma-2": ("google/gemma-2-2b", {"num_hidden_layers": "10"}),  # local and global layers in turn
    "gemma-3": ("google/gemma-3-1b-pt", {"num_hidden_layers": "38"}),  # five local, one global
    "deepseek": ("deepseek-ai/DeepSeek-V2-Lite", {"num_hidden_layers": "7"}),  # the first layer is dense
    "mixtral": ("mistralai/Mixtral-8x7B-v0.1", {"num_hidden_layers": "6"}),
    "t5": ("google-t5/t5-base", {"num_layers": "8", "num_decoder_layers": "7"}),  # block 0 owns the position bias
    "bert": ("google-bert/bert-base-uncased", {"num_hidden_layers": "8"}),
    "vit": ("google/vit-base-patch16-224", {"num_hidden_layers": "8"}),
    "whisper": ("openai/whisper-base", {"encoder_layers": "8", "decoder_layers": "7"}),
    "gpt-neo": ("EleutherAI/gpt-neo-125m", {}),  # attention types in turn
    "gpt2": ("openai-community/gpt2", {"n_layer": "8"}),
    "deberta": ("microsoft/deberta-v3-base", {"num_hidden_layers": "8"}),
}


def request(name: str, **options) -> Request:
    model, overrides = MODELS[name]
    return make_request(model, "a100-80gb", overrides=overrides, micro_batch_size=2, seq_len=64, **options)


def both(asked: Request, **changes) -> tuple[StepTrace, StepTrace, list[Stack]]:
    """(the full trace, the shallow trace, the stacks that it cuts)."""
    options = replace(trace_options(asked), **changes)
    stacks = stacks_of(asked.model, options)
    shallow = trace_step(asked.model, options, depth={s.path: s.shallow for s in stacks})
    return trace_step(asked.model, options), shallow, stacks


def assert_deepens(asked: Request, **changes) -> None:
    full, shallow, stacks = both(asked, **changes)
    assert stacks, "nothing was cut: the test would compare a trace with itself"
    assert shallow.num_ops < full.num_ops
    assert same_structure(deepen(shallow, stacks).trace, full)


@pytest.mark.parametrize("name", [n if n != "gemma-3" else pytest.param(n, marks=pytest.mark.slow) for n in MODELS])
def test_a_deepened_trace_equals_the_full_one(name):
    assert_deepens(request(name))


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
@pytest.mark.parametrize("name", ["llama", "gemma-2", "bert", "gpt2"])
def test_a_deepened_trace_equals_the_full_one_with_recompute(name, reentrant):
    assert_deepens(request(name, recompute="full", reentrant=reentrant))


@pytest.mark.parametrize(
    "options", [{"mode": "inference"}, {"mode": "forward"}, {"precision": "bf16-autocast"}, {"use_cache": True}]
)
def test_a_deepened_trace_equals_the_full_one_in_every_mode(options):
    assert_deepens(request("llama", **options))


@pytest.mark.parametrize("frozen", ["model.embed_tokens", "model.layers.0.", "model.layers.3."])
def test_a_frozen_part_leaves_a_trace_that_is_right(frozen):
    asked = replace(request("llama"), frozen=(frozen,))
    assert same_structure(TraceSource().step(asked), TraceSource(exact=True).step(asked))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("t5", {"recompute": "full", "reentrant": True}),
        ("whisper", {"recompute": "full", "reentrant": True}),
        ("gemma-2", {"use_cache": True}),  # the cache is left behind by layers of two kinds
        ("gpt2", {"precision": "bf16-autocast"}),  # autocast's copies of all biases die at once
        ("bert", {"precision": "bf16-autocast"}),
    ],
)
def test_what_the_blocks_leave_behind_is_right_or_refused(name, options):
    full, shallow, stacks = both(request(name, **options))
    try:
        deep = deepen(shallow, stacks).trace
    except NotPeriodic:
        return
    assert same_structure(deep, full)


def test_a_trace_is_the_same_every_time_it_is_made():
    asked = request("gpt2", precision="bf16-autocast")
    assert same_structure(TraceSource(exact=True).step(asked), TraceSource(exact=True).step(asked))


def test_every_column_counts_in_a_comparison():
    trace = TraceSource(exact=True).step(
        make_request("openai-community/gpt2", "a100-80gb", overrides={"n_layer": "1"}, seq_len=32)
    )
    assert same_structure(trace, replace(trace))
    for column in ("event_kind", "event_arg", "event_aux", "op_call", "op_pass", "op_inputs", "storage_bytes", "storage_role",
                   "storage_op", "storage_output", "call_module", "call_parent"):  # fmt: skip
        changed = getattr(trace, column).copy()
        changed[-1] += 1
        assert not same_structure(trace, replace(trace, **{column: changed})), column
    assert not same_structure(trace, replace(trace, loss_storage=0))
    assert not same_structure(trace, replace(trace, params=trace.params[:-1]))
    other = tuple(replace(s, flops=s.flops + 1) for s in trace.signatures)
    assert not same_structure(trace, replace(trace, signatures=other))


# -- which lists are cut -------------------------------------------------------------------------------------------------


class Block(torch.nn.Module):
    def __init__(self, width: int = 8, index: int = 0) -> None:
        super().__init__()
        self.index = index
        self.linear = torch.nn.Linear(width, width)


def stacks(*blocks: torch.nn.Module) -> list[tuple[int, int, int]]:
    root = torch.nn.Module()
    root.layers = torch.nn.ModuleList(blocks)
    return [(s.head, s.period, s.shallow) for s in find_stacks(root)]


def test_equal_blocks_repeat_from_the_first():
    assert stacks(*(Block() for _ in range(12))) == [(1, 1, 4)]


def test_a_block_that_knows_its_index_is_like_the_others():
    assert stacks(*(Block(index=i) for i in range(12))) == [(1, 1, 4)]


def test_blocks_in_turn_have_their_period():
    assert stacks(*(Block(8 + 8 * (i % 2)) for i in range(12))) == [(2, 2, 8)]


def test_a_first_block_of_another_kind_is_kept():
    assert stacks(Block(16), *(Block() for _ in range(11))) == [(2, 1, 5)]


def test_blocks_that_are_all_different_are_not_cut():
    assert stacks(*(Block(8 * (i + 1)) for i in range(12))) == []


def test_short_lists_are_not_cut():
    assert stacks(*(Block() for _ in range(5))) == []


def test_a_frozen_block_is_a_kind_of_its_own():
    blocks = [Block() for _ in range(12)]
    blocks[0].requires_grad_(False)
    assert stacks(*blocks) == [(2, 1, 5)]


@pytest.mark.parametrize("blocks", [9, 10, 11, 12, 40])
@pytest.mark.parametrize(("head", "period"), [(1, 1), (2, 2), (3, 1), (6, 6), (3, 3)])
def test_every_block_of_the_full_model_has_a_source_of_its_kind(blocks, head, period):
    shallow = head + 3 * period + (blocks - head) % period
    if shallow >= blocks:
        pytest.skip("not cut")
    stack = Stack("layers", blocks, head, period, shallow)
    kind = [("first", b) if b < head else (b - head) % period for b in range(blocks)]
    for block in range(blocks):
        source = stack.source(block)
        assert 0 <= source < shallow
        assert kind[source] == kind[block]
    assert [stack.source(b) for b in range(head)] == list(range(head))
    assert [stack.source(b) for b in range(blocks - period, blocks)] == list(range(shallow - period, shallow))


# -- a user's own modules ------------------------------------------------------------------------------------------------

OWN = """
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self, width=16):
            super().__init__()
            self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

        def forward(self, x):
            return x + self.down(torch.relu(self.up(x)))

    class Net(nn.Module):
        def __init__(self, kind):
            super().__init__()
            self.kind = kind
            blocks = [Block() for _ in range(9)]
            self.layers = nn.Sequential(*blocks) if kind == "sequential" else nn.ModuleList(blocks)
            self.shared = nn.Linear(16, 16)

        def forward(self, x):
            if self.kind == "sequential":
                return self.layers(x)
            if self.kind == "list":
                for layer in self.layers:
                    x = layer(x)
            elif self.kind == "twice":
                for _ in range(2):
                    for layer in self.layers:
                        x = layer(x)
            elif self.kind == "backwards":
                for layer in reversed(self.layers):
                    x = layer(x)
            elif self.kind == "by number":
                for i, layer in enumerate(self.layers):
                    x = layer(x) if i % 3 else layer(x).tanh().exp()
            elif self.kind == "kept":
                seen = []
                for layer in self.layers:
                    x = layer(x)
                    seen.append(x)
                x = torch.stack(seen).mean(0)
            elif self.kind == "skips":
                seen = [x]
                for layer in self.layers:
                    x = layer(x) + seen[len(seen) // 2]
                    seen.append(x)
            elif self.kind == "shared":
                for layer in self.layers:
                    x = layer(self.shared(x))
            elif self.kind == "some":
                for layer in self.layers[:5]:
                    x = layer(x)
            elif self.kind == "wider":
                for i, layer in enumerate(self.layers):
                    x = layer(torch.cat([x, x])) if i in (2, 5) else layer(x)
            return x

    def build(kind="list"):
        return Net(kind), lambda batch, seq: {"x": torch.ones(batch, seq, 16)}, lambda m, b: m(**b).sum()
"""
CUT = ["list", "sequential"]
NOT_CUT = ["twice", "backwards", "by number", "kept", "skips", "shared", "some", "wider"]


@pytest.mark.parametrize("kind", CUT + NOT_CUT)
def test_a_users_own_list_of_blocks_is_answered_rightly(tmp_path, kind):
    file = tmp_path / "own.py"
    file.write_text(textwrap.dedent(OWN))
    asked = make_request(f"{file}:build", "a100-80gb", overrides={"kind": kind}, micro_batch_size=2, seq_len=48)
    assert same_structure(TraceSource().step(asked), TraceSource(exact=True).step(asked))


@pytest.mark.parametrize("kind", CUT)
def test_a_users_own_list_of_blocks_is_cut(tmp_path, kind):
    file = tmp_path / "own.py"
    file.write_text(textwrap.dedent(OWN))
    spec = load(f"{file}:build", overrides={"kind": kind})
    options = TraceOptions(batch_size=2, seq_len=48)
    found = stacks_of(spec, options)
    shallow = trace_step(spec, options, depth={s.path: s.shallow for s in found})
    assert [s.shallow for s in found] == [4]
    assert same_structure(deepen(shallow, found).trace, trace_step(spec, options))


@pytest.mark.parametrize("kind", ["twice", "backwards"])
def test_blocks_that_do_not_run_one_after_the_other_are_refused(tmp_path, kind):
    file = tmp_path / "own.py"
    file.write_text(textwrap.dedent(OWN))
    spec = load(f"{file}:build", overrides={"kind": kind})
    options = TraceOptions(batch_size=2, seq_len=48)
    found = stacks_of(spec, options)
    shallow = trace_step(spec, options, depth={s.path: s.shallow for s in found})
    with pytest.raises(NotPeriodic):
        deepen(shallow, found)


def test_without_stacks_a_trace_stays_as_it_is():
    trace = TraceSource(exact=True).step(
        make_request("openai-community/gpt2", "a100-80gb", overrides={"n_layer": "1"}, seq_len=32)
    )
    expansion = deepen(trace, [])
    assert expansion.trace is trace
    assert expansion.storage.tolist() == list(range(len(trace.storage_bytes)))
