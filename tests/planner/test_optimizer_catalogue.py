"""The catalogue of optimizers: its names, options and messages, laws that every rule obeys, and published figures."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memplan.errors import UserError
from memplan.planner.ledger import Tier
from memplan.planner.optimizers import cli
from memplan.planner.optimizers.catalogue import TORCH_COPIES, entries, entry_of, optimizer_rule, split_options
from memplan.planner.optimizers.flashoptim import AUTOTUNE_BUFFER, FlashOptim
from memplan.planner.optimizers.rule import OptimizerTensor, StepEvents, StepKind

GIB, GB = 2**30, 10**9
DOCUMENTED = [e.name for e in entries().values() if e.rule is not None]
# They cannot take every list of tensors: AdaLomo vectors and matrices only, Adam-mini whole heads.
PICKY = ("adalomo", "adam-mini")
SHAPES = st.lists(st.lists(st.integers(1, 90), max_size=3).map(tuple), min_size=1, max_size=5)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMPLAN_CACHE", str(tmp_path / "cache"))


def layer(dtype: str = "bfloat16") -> list[OptimizerTensor]:
    """A small decoder layer with its embedding, head and norm."""
    sizes = {
        "embed_tokens.weight": (500, 64),
        "layers.0.attn.q_proj.weight": (64, 64),
        "layers.0.attn.k_proj.weight": (32, 64),
        "layers.0.mlp.up.weight": (180, 64),
        "layers.0.mlp.up.bias": (180,),
        "layers.0.mlp.down.weight": (64, 180),
        "norm.weight": (64,),
        "lm_head.weight": (500, 64),
    }
    classes = {"embed_tokens.weight": "Embedding", "norm.weight": "LayerNorm"}
    return [OptimizerTensor(s, dtype, name=n, module_class=classes.get(n, "Linear")) for n, s in sizes.items()]


def dtype_of(name: str) -> str:
    """The 16-bit type that the optimizer takes."""
    return "float16" if name == "apex-lamb" else "bfloat16"


def rule_of(name: str) -> Any:
    return optimizer_rule(name, options={"dim": 64, "n_heads": 8} if name == "adam-mini" else {})


# -- names -----------------------------------------------------------------------------------------------------------------


def test_no_name_is_used_twice():
    known = entries()
    spelt = [*known, *(alias for e in known.values() for alias in e.aliases)]
    assert len(spelt) == len(set(spelt))


@pytest.mark.parametrize("name", entries())
def test_an_entry_says_what_where_and_how_much(name):
    entry = entries()[name]
    assert all((entry.library, entry.version, entry.summary, entry.state, entry.transient, entry.source))
    assert entry.checked in ("state and transient", "state", "nothing")


def test_names_of_transformers_trainer_are_understood():
    from transformers.training_args import OptimizerNames

    known = {name.value for name in OptimizerNames}
    understood = {a for e in entries().values() for a in (e.name, *e.aliases)} & known
    assert understood >= {
        *("adamw_torch", "adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit", "paged_adamw_32bit", "lion_8bit", "lion_32bit"),
        *("adamw_torch_8bit", "adamw_torch_4bit", "ademamix", "ademamix_8bit", "rmsprop_bnb", "rmsprop_bnb_8bit"),
        *("galore_adamw", "galore_adamw_8bit", "galore_adafactor", "apollo_adamw", "lomo", "adalomo", "stable_adamw"),
        *(
            "adamw_torch_fused",
            "schedule_free_adamw",
            "schedule_free_radam",
            "schedule_free_sgd",
            "grokadamw",
            "sgd",
            "adagrad",
        ),
    }
    # what is left: other devices, a library that is no longer made, and the layer-wise forms, which are --strategy release
    left = {n for n in known - understood if "xla" not in n and "npu" not in n and not n.endswith("layerwise")}
    assert left == {"adamw_anyprecision"}


def test_the_default_of_transformers_trainer_is_the_fused_adamw_of_torch():
    assert (optimizer_rule("adamw_torch_fused").name, optimizer_rule("adamw_torch_fused").impl) == ("adamw", "fused")
    assert optimizer_rule("adamw_torch").impl == "foreach"


def test_another_spelling_is_the_same_rule():
    assert optimizer_rule("adamw_bnb_8bit") == optimizer_rule("adamw-8bit")
    assert optimizer_rule("flashadamw").name == "flash-adamw"


@pytest.mark.parametrize("name", TORCH_COPIES)
def test_torchs_own_keep_as_many_copies_as_the_list_says(name):
    tensors = [OptimizerTensor((30, 20), "bfloat16")]
    slack = 3 * 4  # ASGD's scalars
    assert 0 <= optimizer_rule(name).step(tensors).state_bytes - TORCH_COPIES[name] * 1200 <= slack


def test_the_figure_of_an_entry_is_that_of_its_rule():
    for entry in entries().values():
        if entry.per_parameter is not None:
            events = optimizer_rule(entry.name).step([OptimizerTensor((64, 64), "bfloat16", name="layers.0.mlp.weight")])
            assert events.state_bytes == entry.per_parameter * 64 * 64


# -- options ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("adamw", ("adamw", {})),
        ("galore-adamw:rank=64,targets=q_proj+v_proj", ("galore-adamw", {"rank": "64", "targets": "q_proj+v_proj"})),
        ("flash-adamw: master_weight_bits = none", ("flash-adamw", {"master_weight_bits": "none"})),
    ],
)
def test_options_are_written_behind_the_name(text, expected):
    assert split_options(text) == expected


@pytest.mark.parametrize("bits", ["none", "24", "32"])
def test_an_option_is_read_as_its_type(bits):
    rule = optimizer_rule(f"flash-adamw:master_weight_bits={bits},quantize=false")
    assert rule == FlashOptim(master_weight_bits=None if bits == "none" else int(bits), quantize=False)
    assert optimizer_rule("galore-adamw:targets=q+v").targets == ("q", "v")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("flash-adamv", "--optimizer flash-adamv: not known. Did you mean flash-adam"),
        ("flash-adamw:bits=24", "no option 'bits'"),
        ("flash-adamw:master_weight_bits=16", "master_weight_bits=16: expected 24, 32 or none"),
        ("flash-adamw:quantize=maybe", "quantize=maybe: expected true or false"),
        ("galore-adamw:rank=many", "rank=many: expected a whole number"),
        ("galore-adamw:rank=0", "rank=0: must be at least 1"),
        ("galore-adamw:rank", "'rank' is no OPTION=VALUE"),
        ("apollo-adamw:scale_type=row", "scale_type=row: expected channel or tensor"),
        ("adamw:lr=1", "torch's own has no options here"),
        ("torchao-adamw-4bit:block_size=3", "block_size=3"),
        ("adam-mini:dim=10,n_heads=3", "n_heads=3 does not divide dim\\*dim of dim=10"),
        ("adamw-8bit:embeddings=16", "embeddings=16: expected 8, 32 or none"),
    ],
)
def test_a_mistake_is_one_sentence(name, message):
    with pytest.raises(UserError, match=message) as refused:
        optimizer_rule(name)
    assert "\n" not in str(refused.value)


def test_an_implementation_is_only_torchs_to_choose():
    with pytest.raises(UserError, match="lion has one implementation"):
        optimizer_rule("lion", "fused")
    assert optimizer_rule("badam", "fused").impl == "fused"


def test_apex_refuses_bf16():
    with pytest.raises(UserError, match="fp16 and fp32 parameters, got bfloat16"):
        optimizer_rule("apex-lamb").step(layer())


@pytest.mark.parametrize("shape", [(), (2, 3, 4)])
def test_adalomo_refuses_what_its_library_fails_on(shape):
    with pytest.raises(UserError, match="not 1 or 2"):
        optimizer_rule("adalomo").step([OptimizerTensor(shape, "bfloat16")])


def test_adam_mini_asks_for_the_models_own_heads():
    with pytest.raises(UserError, match=r"no whole number of heads of 131072 .*dim=HIDDEN"):
        optimizer_rule("adam-mini").step(layer())


# -- laws ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", DOCUMENTED)
def test_every_block_is_made_once_and_every_temporary_freed(name, dtype):
    rule = rule_of(f"{name}:master_weight_bits=none" if name.startswith("flash") and dtype == "float32" else name)
    events = rule.step(layer(dtype_of(name) if dtype == "bfloat16" else dtype))
    for part in (events.init, events.first, events.later):
        made: dict[int, StepKind] = {}
        for event in part:
            if event.kind is StepKind.FREE:
                assert made.pop(event.slot) is StepKind.TEMP
            elif event.kind is StepKind.DROP_GRAD:
                assert event.nbytes == 0
            else:
                assert event.slot not in made
                assert event.nbytes > 0
                made[event.slot] = event.kind
        assert StepKind.TEMP not in made.values()
    assert not any(e.kind is StepKind.STATE for e in events.later)


@pytest.mark.parametrize("name", DOCUMENTED)
def test_no_tensors_need_nothing(name):
    assert rule_of(name).step([]) == StepEvents((), ())


@pytest.mark.parametrize("name", DOCUMENTED)
def test_the_order_of_the_parameters_does_not_change_the_state(name):
    tensors = layer(dtype_of(name))
    assert rule_of(name).step(tensors).state_bytes == rule_of(name).step(tensors[::-1]).state_bytes


@pytest.mark.parametrize("name", DOCUMENTED)
def test_a_frozen_parameter_has_no_state(name):
    tensors = layer(dtype_of(name))
    owners = {e.tensor for e in (*rule_of(name).step(tensors).init, *rule_of(name).step(tensors).first)}
    assert owners <= {-1, *range(len(tensors))}
    trained = tensors[1:]  # the embedding is frozen: strategies leave it out of the list
    kept = rule_of(name).step(trained).state_bytes
    whole = rule_of(name).step(tensors)
    embedding = sum(e.nbytes for e in (*whole.init, *whole.first) if e.kind is StepKind.STATE and e.tensor == 0)
    books = 2048 if "8bit" in name else 0  # code books belong to the optimizer, and show up at the first parameter
    assert whole.state_bytes - embedding - books <= kept <= whole.state_bytes - embedding + books


def state(name: str, tensors: list[OptimizerTensor], **options: Any) -> int:
    return optimizer_rule(name, options=options).step(tensors).state_bytes


@settings(max_examples=40, deadline=None)
@given(SHAPES, st.sampled_from(["bfloat16", "float16", "float32"]))
def test_more_bits_never_cost_fewer_bytes(shapes, dtype):
    tensors = [OptimizerTensor(s, dtype) for s in shapes]
    books = 2048
    for kind in ("adamw", "lion", "ademamix"):
        assert state(f"{kind}-8bit", tensors) <= state(f"{kind}-32bit", tensors) + books
        assert state(f"paged-{kind}-8bit", tensors) == state(f"{kind}-8bit", tensors)
    if any(s.dtype != "float32" for s in tensors):
        for name in ("flash-adamw", "flash-lion", "flash-sgd"):
            none, low, high = (state(name, tensors, master_weight_bits=b) for b in (None, 24, 32))
            assert none <= low <= high
            # 24 bits are one byte beside 16, 32 bits two
            halves = sum(t.numel for t in tensors if t.dtype != "float32")
            assert (low - none, high - none) == (halves, 2 * halves)
    quantised = state("flash-adamw", tensors, master_weight_bits=None)
    plain = state("flash-adamw", tensors, master_weight_bits=None, quantize=False)
    assert quantised <= plain + 2 * 2 * len(tensors)  # the scale of a group that is not full


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 200), st.integers(1, 200), st.integers(1, 64), st.sampled_from(["bfloat16", "float32"]))
def test_a_higher_rank_never_keeps_less(rows, columns, rank, dtype):
    weight = [OptimizerTensor((rows, columns), dtype, name="layers.0.mlp.weight", module_class="Linear")]
    for name in ("galore-adamw", "galore-adafactor", "apollo-adamw"):
        assert state(name, weight, rank=rank) <= state(name, weight, rank=rank + 1)


@settings(max_examples=30, deadline=None)
@given(SHAPES)
def test_every_rule_takes_every_list_of_tensors(shapes):
    for name in DOCUMENTED:
        tensors = [OptimizerTensor(s, dtype_of(name)) for s in shapes]
        if name in (*PICKY, "badam", "muon"):
            continue  # the last two trace torch's AdamW: too slow for many lists, and tested on few
        events = optimizer_rule(name).step(tensors)
        assert StepEvents.transient_bytes(events.later) >= 0


def test_only_the_states_of_host_and_paged_optimizers_are_elsewhere():
    for name in DOCUMENTED:
        tensors = [OptimizerTensor((400, 300), dtype_of(name), name="layers.0.mlp.weight", module_class="Linear")]
        events = rule_of("adam-mini:dim=10,n_heads=1" if name == "adam-mini" else name).step(tensors)
        elsewhere = {tier for tier in Tier if tier is not Tier.GPU and events.state_bytes_in(tier)}
        expected = {
            "deepspeed-cpu-adam": {Tier.HOST_PAGEABLE},
            "grokadamw": {Tier.HOST_PAGEABLE},
            "hift": {Tier.HOST_PAGEABLE},
            "torchao-cpu-offload": {Tier.HOST_PAGEABLE, Tier.HOST_PINNED},
        }.get(name, {Tier.GPU_MANAGED} if name.startswith("paged") else set())
        assert elsewhere == expected, name


# -- published figures -----------------------------------------------------------------------------------------------------


def llama2_7b() -> list[OptimizerTensor]:
    layers = [
        [(4096, 4096)] * 4 + [(11008, 4096)] * 2 + [(4096, 11008)] + [(4096,)] * 2  # q k v o, gate up, down, norms
        for _ in range(32)
    ]
    shapes = [(32000, 4096), *(s for block in layers for s in block), (4096,), (32000, 4096)]
    return [OptimizerTensor(s, "bfloat16") for s in shapes]


def test_flash_adamw_takes_7_bytes_a_parameter_and_5_when_gradients_are_released():
    weight = OptimizerTensor((4096, 4096), "bfloat16")
    kept = state("flash-adamw", [weight]) / weight.numel
    assert (2 + kept + 2, 2 + kept) == (7.125, 5.125)  # arXiv 2602.23349: 16 -> 7 -> 5 bytes


def test_a_checkpoint_of_flash_adamw_is_half_of_that_of_adamw():
    weight = OptimizerTensor((4096, 4096), "bfloat16")
    rule = optimizer_rule("flash-adamw")
    assert isinstance(rule, FlashOptim)
    assert 2 + rule.checkpoint_bytes([weight]) / weight.numel == 6.125  # of 12: the 8-bit residual is saved as 16 bits


def test_the_optimizer_of_llama_3_1_8b_is_as_large_as_flashoptims_figure():
    # README figure of FlashOptim, read off its bars: parameters 14.9 and optimizer 23.35 GiB, the reference 29.9 and 59.8
    numel = 8_030_261_248
    kept = state("flash-adamw", [OptimizerTensor((numel // 4096, 4096), "bfloat16")])
    assert kept / GIB == pytest.approx(23.35, abs=0.05)


def test_flash_adamw_saves_what_transformers_measured_on_qwen_2_5_7b():
    # huggingface/transformers pull request 44438: 76.44 GB with bf16 AdamW, 69.79 (24 bits), 62.15 (none)
    numel = 7_615_616_512
    weight = [OptimizerTensor((numel // 3584, 3584), "bfloat16")]
    adamw = 4 * numel
    assert (adamw - state("flash-adamw", weight)) / GB == pytest.approx(76.44 - 69.79, abs=0.02)
    assert (adamw - state("flash-adamw", weight, master_weight_bits=None)) / GB == pytest.approx(76.44 - 62.15, abs=0.02)


@pytest.mark.parametrize(
    ("name", "saved"), [("adamw-8bit", 51.6 - 39.3), ("torchao-adamw-8bit", 51.6 - 39.1), ("torchao-adamw-4bit", 51.6 - 33.2)]
)
def test_8_and_4_bits_save_what_torchao_measured_on_llama_2_7b(name, saved):
    # torchao's README, low-bit optimizers: peaks of a full bf16 fine-tune on an A100, in GiB
    tensors = llama2_7b()
    adamw = 2 * sum(t.nbytes for t in tensors)
    assert (adamw - state(name, tensors)) / GIB == pytest.approx(saved, abs=0.15)


def test_embeddings_at_32_bits_of_llama_3_take_almost_4_gib():
    table = [OptimizerTensor((128256, 4096), "bfloat16", name="embed_tokens.weight", module_class="Embedding")]
    assert state("adamw-8bit", table, embeddings=32) / GIB == pytest.approx(3.91, abs=0.01)
    assert state("adamw-8bit", table) / GIB == pytest.approx(0.99, abs=0.01)


def test_the_first_step_of_flash_adamw_times_its_kernel_once_for_every_size():
    tensors = [OptimizerTensor((64, 64), "bfloat16"), OptimizerTensor((4096,), "bfloat16"), OptimizerTensor((7,), "bfloat16")]
    events = optimizer_rule("flash-adamw").step(tensors)
    assert [e.nbytes for e in events.first].count(AUTOTUNE_BUFFER) == 2
    assert StepEvents.transient_bytes(events.later) == 0


# -- the command line ------------------------------------------------------------------------------------------------------


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    cli.add_commands(parser.add_subparsers())
    args = parser.parse_args(["optimizers", *words])
    return int(args.run(args))


def test_the_list_names_every_optimizer_on_a_line_of_its_own(capsys):
    assert run("list") == 0
    first_words = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert [w for w in first_words if w in entries()] == list(entries())


def test_one_optimizer_is_shown_with_its_options_and_traps(capsys):
    assert run("show", "paged_adamw_8bit") == 0
    shown = capsys.readouterr().out
    for text in ("paged-adamw-8bit", "bitsandbytes 0.50.2", "2.03125", "min_8bit_size=4096", "managed memory needs CUDA"):
        assert text in shown


@pytest.mark.parametrize("words", [("list",), ("show", "flash-adamw")])
def test_json_has_the_figures_as_numbers(words, capsys):
    assert run(*words, "--json") == 0
    data = json.loads(capsys.readouterr().out)
    flash = next(d for d in (data if isinstance(data, list) else [data]) if d["name"] == "flash-adamw")
    assert flash["state_bytes_per_parameter"] == {"bfloat16": 3.125, "float32": None}
    assert flash["options"] == {"master_weight_bits": 24, "quantize": True, "fused": True}


def test_an_unknown_name_is_an_error_with_a_suggestion():
    with pytest.raises(UserError, match="Did you mean"):
        run("show", "lionn")


def test_the_list_needs_no_torch():
    code = """
import argparse, sys
from memplan.planner.optimizers import cli
assert "numpy" not in sys.modules
parser = argparse.ArgumentParser()
cli.add_commands(parser.add_subparsers())
args = parser.parse_args(["optimizers", "list"])
args.run(args)
assert "torch" not in sys.modules and "transformers" not in sys.modules
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False).stderr == ""


def test_two_lists_that_differ_in_names_only_are_two_questions():
    shape = (64, 48)
    projected = OptimizerTensor(shape, "bfloat16", name="layers.0.mlp.weight", module_class="Linear")
    plain = OptimizerTensor(shape, "bfloat16", name="head.weight", module_class="Linear")
    assert projected == plain  # for caches of what names do not change
    assert state("galore-adamw", [projected], rank=4) < state("galore-adamw", [plain], rank=4) == 2 * 2 * 64 * 48


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("paged-adamw8bit", "paged-adamw-8bit"),
        ("AdamW", "adamw"),
        ("FlashAdamW", "flash-adamw"),
        ("galore_adamw8bit", "galore-adamw-8bit"),
    ],
)
def test_hyphens_and_capitals_do_not_matter(written, name):
    assert entry_of(written).name == name
