"""FSDP2 by hand, on a chain of square linear layers: a weight is W bytes, a hidden state H, a shard S."""

from __future__ import annotations

import json
import textwrap

import numpy as np
import pytest
from memplan.errors import CannotTell, UserError
from memplan.models import load
from memplan.planner.ledger import Component, Ledger
from memplan.planner.loop import LoopFacts
from memplan.planner.optimizers.traced import traced_rule
from memplan.planner.simulate import simulate
from memplan.planner.strategies.fsdp2 import Fsdp2Settings, FullyShard
from memplan.planner.strategies.fsdp_units import embedding_and_head
from memplan.planner.strategies.single import SingleDevice
from memplan.planner.trace.options import TraceOptions
from memplan.planner.trace.steptrace import Phase, StepTrace
from memplan.planner.trace.tracer import trace_step

W = 64 * 64 * 4
H = 8 * 64 * 4
S = W // 4  # of four ranks
SCALAR = 4  # the loss

MODELS = """
    import torch

    def chain(dtype=None, edges=False):
        kind = torch.bfloat16 if dtype == "bfloat16" else torch.float32
        linear = lambda: torch.nn.Linear(64, 64, bias=False, dtype=kind)
        model = torch.nn.Sequential()
        if edges:
            model.first = linear()
        model.blocks = torch.nn.Sequential(*(linear() for _ in range(3)))
        if edges:
            model.last = linear()
        return model, lambda batch, seq: {"input": torch.ones(batch, 64, dtype=kind)}, lambda m, b: m(**b).sum()

    def scaled():
        model, batch, step = chain()
        model.blocks.scale = Scale()
        return model, batch, step

    class Scale(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.by = torch.nn.Parameter(torch.tensor(2.0))

        def forward(self, x):
            return x * self.by

    def twice():
        model, batch, _ = chain()
        return model, batch, lambda m, b: (m(**b) + m(**b)).sum()
"""


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMPLAN_CACHE", str(tmp_path / "cache"))


def traced(tmp_path, factory="chain", **overrides) -> StepTrace:
    file = tmp_path / "net.py"
    file.write_text(textwrap.dedent(MODELS))
    return trace_step(load(f"{file}:{factory}", overrides=overrides), TraceOptions(batch_size=8, seq_len=1, target="cpu"))


def run(trace: StepTrace, world_size: int = 4, *, rank=0, loop: LoopFacts | None = None, optimizer="adamw", **settings):
    strategy = FullyShard(world_size, Fsdp2Settings(**settings))
    rule = traced_rule(optimizer, "for-loop" if optimizer == "adafactor" else "foreach")
    ledger, work = simulate(trace, strategy, optimizer=rule, loop=loop, rank=rank)
    ledger.check()
    return ledger, work


def live_in(ledger: Ledger, phase: Phase, iteration: int = 0) -> np.ndarray:
    rows = ledger.rows()
    return ledger.live_bytes()[(ledger.phase[rows] == phase) & (ledger.iteration[rows] == iteration)]


def peak_in(ledger: Ledger, phase: Phase, iteration: int = 0) -> int:
    return int(live_in(ledger, phase, iteration).max())


def after(ledger: Ledger, phase: Phase, iteration: int = 0) -> int:
    return int(live_in(ledger, phase, iteration)[-1])


def made(ledger: Ledger, what: str) -> list[int]:
    born = np.flatnonzero(ledger.delta_bytes > 0)
    return [int(ledger.delta_bytes[i]) for i in born if ledger.labels[ledger.label[i]][1] == what]


def test_a_rank_keeps_its_share_of_parameters_gradients_and_states(tmp_path):
    ledger, _ = run(traced(tmp_path))
    assert after(ledger, Phase.INIT) == 3 * S
    assert after(ledger, Phase.BACKWARD) == 3 * S + 3 * S + H + SCALAR
    assert after(ledger, Phase.STEP) == 3 * S + 6 * S + H + SCALAR
    # parameters, gradients, two states and a list of foreach temporaries
    assert peak_in(ledger, Phase.STEP) == (3 + 3 + 6 + 3) * S + H + SCALAR


def test_the_model_is_whole_while_its_blocks_are_sharded_one_by_one(tmp_path):
    ledger, _ = run(traced(tmp_path))
    assert peak_in(ledger, Phase.INIT) == 3 * W + S


def test_forward_peaks_where_a_block_is_copied_out_beside_its_own_gather_and_the_last_one(tmp_path):
    ledger, _ = run(traced(tmp_path))
    # three shards; two all-gather outputs and the gathered weight; the states x h1 h2
    assert peak_in(ledger, Phase.FORWARD) == 3 * S + 3 * W + 3 * H


def test_backward_peaks_with_a_block_the_next_gather_a_gradient_and_the_last_reduction(tmp_path):
    ledger, _ = run(traced(tmp_path))
    # the middle block: shards and one reduced gradient; its weight, the gather of the first block, the reduce-scatter input of
    # the last block, its gradient; x h1 and the gradients of h1 h2; the loss, and the 1 that backward starts from
    assert peak_in(ledger, Phase.BACKWARD) == 3 * S + S + 4 * W + 4 * H + 2 * SCALAR


def test_every_weight_is_gathered_twice_and_reduced_once_a_step(tmp_path):
    _, work = run(traced(tmp_path), loop=LoopFacts(iterations=1))
    assert [w.nbytes for w in work if w.kind == "all_gather"] == [W] * 6
    assert [w.nbytes for w in work if w.kind == "reduce_scatter"] == [W] * 3


def test_weights_that_stay_after_forward_are_gathered_once(tmp_path):
    ledger, work = run(traced(tmp_path), reshard_after_forward=False, loop=LoopFacts(iterations=1))
    assert [w.nbytes for w in work if w.kind == "all_gather"] == [W] * 3
    assert after(ledger, Phase.FORWARD) == 3 * S + 3 * W + H + 2 * H + SCALAR


def test_the_root_keeps_its_own_weights_through_backward(tmp_path):
    ledger, _ = run(traced(tmp_path, edges="true"))
    # five shards, both weights of the root; x h1 .. h4; the loss
    assert after(ledger, Phase.FORWARD) == 5 * S + 2 * W + 5 * H + SCALAR
    dropped, _ = run(traced(tmp_path, edges="true"), reshard_after_forward=True)
    assert after(dropped, Phase.FORWARD) == 5 * S + 5 * H + SCALAR


def test_rows_are_padded_to_the_same_number_on_every_rank(tmp_path):
    trace = traced(tmp_path)
    row = 64 * 4
    ledger, work = run(trace, 3, rank=2)  # 64 rows: 22, 22 and 20
    assert after(ledger, Phase.INIT) == 3 * 22 * row
    assert next(w.nbytes for w in work if w.kind == "all_gather") == 66 * row
    # states have no padding
    assert ledger.components_after(len(ledger) - 1)["optimizer_state"] == 2 * 3 * 20 * row
    first, _ = run(trace, 3, rank=0)
    assert first.components_after(len(first) - 1)["optimizer_state"] == 2 * 3 * 22 * row


def test_a_rank_without_rows_keeps_padding_only(tmp_path):
    ledger, _ = run(traced(tmp_path), 100, rank=99)
    assert after(ledger, Phase.INIT) == 3 * 64 * 4
    assert "optimizer_state" not in ledger.components_after(len(ledger) - 1)


def test_one_rank_gathers_nothing_and_keeps_as_much_as_a_single_device(tmp_path):
    trace = traced(tmp_path)
    ledger, work = run(trace, 1)
    alone, _ = simulate(trace, SingleDevice(), optimizer=traced_rule("adamw", "foreach"))
    assert not [w for w in work if w.kind == "all_gather"]
    assert ledger.live_bytes()[-1] == alone.live_bytes()[-1]


def test_the_shards_of_all_ranks_sum_to_the_whole(tmp_path):
    trace = traced(tmp_path)
    states = [run(trace, 3, rank=r)[0] for r in range(3)]
    assert sum(s.components_after(len(s) - 1)["optimizer_state"] for s in states) == 2 * 3 * W


MIXED = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}


def test_mixed_precision_gathers_narrow_casts_and_reduces_wide_gradients(tmp_path):
    ledger, work = run(traced(tmp_path, dtype="bfloat16"), loop=LoopFacts(iterations=1), **MIXED)
    assert after(ledger, Phase.INIT) == 3 * S
    assert set(made(ledger, "cast shards")) == {S // 2}
    assert [w.nbytes for w in work if w.kind == "all_gather"] == [W // 2] * 6
    assert made(ledger, "reduce-scatter input") == [W] * 3
    assert made(ledger, "sharded gradients") == [S] * 3


def test_gradients_reduced_in_the_narrow_type_are_cast_to_the_stored_one(tmp_path):
    ledger, _ = run(traced(tmp_path, dtype="bfloat16"), loop=LoopFacts(iterations=1), param_dtype="bfloat16")
    assert made(ledger, "sharded gradients") == [S // 2, S] * 3
    assert after(ledger, Phase.BACKWARD) == 3 * S + 3 * S + H + SCALAR // 2  # the batch is in fp32


def test_accumulation_without_reduction_keeps_whole_gradients_in_the_type_of_the_reduction(tmp_path):
    ledger, work = run(traced(tmp_path, dtype="bfloat16"), loop=LoopFacts(grad_accum_steps=2, iterations=1), **MIXED)
    assert made(ledger, "accumulated gradient") == [W] * 3
    assert [w.nbytes for w in work if w.kind == "reduce_scatter"] == [W] * 3


def test_accumulation_with_reduction_in_every_micro_step_keeps_shards_only(tmp_path):
    trace, loop = traced(tmp_path), LoopFacts(grad_accum_steps=2, iterations=1)
    ledger, work = run(trace, loop=loop, no_sync=False)
    assert len([w for w in work if w.kind == "reduce_scatter"]) == 6
    whole, _ = run(trace, loop=loop)
    assert peak_in(whole, Phase.FORWARD) - peak_in(ledger, Phase.FORWARD) == 3 * W - 3 * S


def test_zeroed_gradients_stay(tmp_path):
    ledger, _ = run(traced(tmp_path), loop=LoopFacts(set_to_none=False))
    assert ledger.components_after(len(ledger) - 1)["grad"] == 3 * S


def test_no_communication_buffer_survives_a_step(tmp_path):
    ledger, _ = run(traced(tmp_path, edges="true"))
    rows = ledger.component == Component.COMM_BUFFER
    assert rows.any()
    assert ledger.delta_bytes[rows].sum() == 0


def test_the_wrapped_modules_can_be_named(tmp_path):
    trace = traced(tmp_path)
    _, work = run(trace, blocks=("blocks.1",), loop=LoopFacts(iterations=1))
    # forward: the root's two weights, then the block; backward: the block, since the root keeps its own
    assert [w.nbytes for w in work if w.kind == "all_gather"] == [2 * W, W, W]


def test_a_head_of_its_own_stays_after_forward_and_an_embedding_does_not(tmp_path):
    trace = traced(tmp_path, edges="true")
    ledger, work = run(trace, embedding="first", head=("last",), loop=LoopFacts(iterations=1))
    assert [w.nbytes for w in work if w.kind == "all_gather"] == [W] * 5 + [W] * 4
    assert after(ledger, Phase.FORWARD) == 5 * S + W + 5 * H + SCALAR


def test_modules_that_are_one_unit_are_gathered_and_reduced_together(tmp_path):
    trace = traced(tmp_path, edges="true")
    _, work = run(trace, blocks=("blocks.0", "blocks.1"), head=("blocks.2", "last"), loop=LoopFacts(iterations=1))
    # forward: the root's first weight, two blocks, the unit; backward: the blocks, as the root and the unit kept theirs
    assert [w.nbytes for w in work if w.kind == "all_gather"] == [W, W, W, 2 * W, W, W]
    assert [w.nbytes for w in work if w.kind == "reduce_scatter"] == [2 * W, W, W, W]


@pytest.mark.parametrize(
    ("config", "embedding", "head"),
    [
        ({"model_type": "llama"}, "model.embed_tokens", ("model.norm", "lm_head")),
        ({"model_type": "llama", "tie_word_embeddings": True}, "", ("model.embed_tokens", "model.norm", "lm_head")),
        ({"model_type": "gpt2"}, "", ("transformer.wte", "transformer.ln_f", "lm_head")),
        ({"model_type": "gpt_neox"}, "gpt_neox.embed_in", ("gpt_neox.final_layer_norm", "lm_head")),
        ({"model_type": "bert"}, "", ("bert.embeddings.word_embeddings", "cls.predictions.decoder")),
        ({"model_type": "bert", "task": "seq-classification"}, "bert.embeddings.word_embeddings", ()),
        ({"model_type": "qwen2", "task": "seq-classification"}, "model.embed_tokens", ("model.norm",)),
    ],
    ids=str,
)
def test_accelerates_units_are_those_that_it_finds(tmp_path, config, embedding, head):
    transformers = pytest.importorskip("transformers")
    fsdp_utils = pytest.importorskip("accelerate.utils.fsdp_utils")
    small = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 128,
        "num_key_value_heads": 2, "tie_word_embeddings": config["model_type"] in ("gpt2", "bert"),
    }  # fmt: skip
    task = config.get("task", "masked-lm" if config["model_type"] == "bert" else "causal-lm")
    auto = {"causal-lm": "CausalLM", "masked-lm": "MaskedLM", "seq-classification": "SequenceClassification"}[task]
    made = {**small, **{key: value for key, value in config.items() if key not in ("model_type", "task")}}
    real = transformers.AutoConfig.for_model(config["model_type"], **made)
    (tmp_path / "config.json").write_text(json.dumps(real.to_dict()))
    model = getattr(transformers, f"AutoModelFor{auto}").from_config(real)

    trace = trace_step(load(str(tmp_path), task=task), TraceOptions(batch_size=1, seq_len=8, target="cpu"))
    found = embedding_and_head(trace)

    assert found == (embedding, head)
    names = {module: name for name, module in model.named_modules()}
    theirs = [model.get_input_embeddings(), fsdp_utils._find_final_norm(model), model.get_output_embeddings()]
    assert set(filter(None, (found[0], *found[1]))) == {names[module] for module in theirs if module is not None}


def test_a_module_that_is_not_there_cannot_be_wrapped(tmp_path):
    with pytest.raises(UserError, match=r"no module 'blocks\.7' to wrap"):
        run(traced(tmp_path), blocks=("blocks.7",))


def test_the_blocks_are_those_of_the_longest_list_of_equal_modules():
    modules = [("", "Net"), ("stem", "Sequential"), ("stem.0", "A"), ("stem.1", "B"), ("stem.2", "A")]
    modules += [("a", "ModuleList"), ("a.0", "L"), ("a.1", "L"), ("b", "ModuleList"), ("b.0", "L"), ("b.1", "L")]
    assert FullyShard().block_fqns(modules) == ["a.0", "a.1"]
    assert FullyShard().block_fqns([("", "Net"), ("x", "Linear")]) == []


@pytest.mark.parametrize(
    ("factory", "optimizer", "says"),
    [
        ("scaled", "adamw", r"refuses the scalar parameter blocks\.scale\.by"),
        ("twice", "adamw", "runs the whole model once"),
        ("chain", "adafactor", "cannot step sharded parameters"),
    ],
)
def test_what_fully_shard_cannot_do_is_told(tmp_path, factory, optimizer, says):
    with pytest.raises(CannotTell, match=says):
        run(traced(tmp_path, factory), optimizer=optimizer)
