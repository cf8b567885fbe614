"""Adapters and 4-bit bases: sizes against closed forms, and refusals in one line."""

from __future__ import annotations

import pytest
import torch
from memplan.errors import CannotTell, UserError
from memplan.models import build, load
from memplan.models.adapters import ADAPTER_METHODS, KINDS, AdapterSettings, Kind, base_of, library_versions, targets_of
from memplan.models.builder import casts_in_place
from torch._subclasses.fake_tensor import FakeTensorMode

peft = pytest.importorskip("peft")

SMALL = {
    "num_hidden_layers": "2",
    "hidden_size": "256",
    "intermediate_size": "512",
    "num_attention_heads": "4",
    "num_key_value_heads": "2",
    "head_dim": "64",
    "vocab_size": "1024",
}
# (inputs, outputs) of the linear layers of one block
LINEARS = {
    "q_proj": (256, 256), "k_proj": (256, 128), "v_proj": (256, 128), "o_proj": (256, 256),
    "gate_proj": (256, 512), "up_proj": (256, 512), "down_proj": (512, 256),
}  # fmt: skip
LAYERS = 2


def adapted(settings: AdapterSettings, dtype: torch.dtype = torch.bfloat16, task: str = "causal-lm"):
    spec = load("meta-llama/Llama-3.1-8B", overrides=SMALL, task=task)
    with FakeTensorMode(allow_non_fake_inputs=True), casts_in_place():
        built = build(spec, dtype=dtype)
        return settings.apply(built.module, task=task, compute_dtype=dtype)


def trained(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("rank", [1, 8, 64])
def test_lora_adds_rank_times_inputs_and_outputs_of_every_target(rank):
    module, _ = adapted(AdapterSettings(rank=rank, targets=("all-linear",)))
    expected = LAYERS * sum(rank * (k + n) for k, n in LINEARS.values())
    assert sum(p.numel() for p in trained(module).values()) == expected


def test_without_targets_lora_goes_where_peft_puts_it_for_the_family():
    module, said = adapted(AdapterSettings(rank=4))
    expected = LAYERS * sum(4 * sum(LINEARS[name]) for name in ("q_proj", "v_proj"))
    assert sum(p.numel() for p in trained(module).values()) == expected
    assert any("q_proj, v_proj" in line for line in said)


def test_dora_adds_one_magnitude_for_each_output():
    module, _ = adapted(AdapterSettings(kind="dora", rank=4, targets=("q_proj",)))
    assert sum(p.numel() for p in trained(module).values()) == LAYERS * (4 * (256 + 256) + 256)


def test_oft_trains_the_upper_triangles_of_its_blocks():
    module, _ = adapted(AdapterSettings(kind="oft", rank=32, targets=("q_proj",)))
    assert sum(p.numel() for p in trained(module).values()) == LAYERS * (256 // 32) * 32 * 31 // 2


@pytest.mark.parametrize("settings", [AdapterSettings(), AdapterSettings.of("qlora")])
def test_adapters_of_a_16_bit_and_of_a_4_bit_base_are_in_fp32(settings):
    if settings.base_quant != "none":
        pytest.importorskip("bitsandbytes")
    module, _ = adapted(settings)
    assert {p.dtype for p in trained(module).values()} == {torch.float32}


def test_adapters_can_be_kept_in_the_dtype_of_the_base():
    module, _ = adapted(AdapterSettings(adapter_dtype="base"))
    assert {p.dtype for p in trained(module).values()} == {torch.bfloat16}


def test_modules_to_save_train_in_full():
    module, _ = adapted(AdapterSettings(targets=("q_proj",), rank=1, modules_to_save=("lm_head",)))
    assert sum(p.numel() for p in trained(module).values()) == LAYERS * (256 + 256) + 1024 * 256


def test_a_classification_head_trains_beside_the_adapter():
    module, _ = adapted(AdapterSettings(), task="seq-classification")
    assert any("score" in name for name in trained(module))


@pytest.mark.parametrize("how", ["nf4", "nf4-dq", "fp4", "fp4-dq"])
def test_a_4_bit_base_takes_the_bytes_that_bitsandbytes_documents(how):
    pytest.importorskip("bitsandbytes")
    module, _ = adapted(AdapterSettings(base_quant=how))
    stored = 0
    for k, n in LINEARS.values():
        blocks = k * n // 64
        statistics = blocks + 4 * -(-blocks // 256) + 4 * 256 + 4 if how.endswith("dq") else 4 * blocks
        stored += LAYERS * (k * n // 2 + statistics + 4 * 16)
    packed = [p for p in module.parameters() if p.dtype == torch.uint8]
    tables = [b for name, b in module.named_buffers() if ".weight_" in name]
    assert sum(t.numel() * t.itemsize for t in (*packed, *tables)) == stored


def test_the_packed_sizes_are_those_that_bitsandbytes_makes_of_real_weights():
    bnb = pytest.importorskip("bitsandbytes")
    weight = bnb.nn.Params4bit(torch.randn(96, 200), requires_grad=False, quant_type="nf4", compress_statistics=True).to("cpu")
    state = weight.quant_state
    real = {t.numel() * t.itemsize for t in (weight, state.absmax, state.code, state.state2.absmax, state.state2.code)}
    blocks = 96 * 200 // 64
    assert real == {96 * 200 // 2, blocks, 4 * 16, 4 * -(-blocks // 256), 4 * 256}


def test_a_gptq_base_takes_4_bits_a_weight_and_scales_and_zeros_of_groups_of_128():
    module, said = adapted(AdapterSettings(base_quant="gptq", upcast=False), torch.float16)
    stored = sum(
        LAYERS * (k * n // 2 + 2 * (k // 128) * n + (k // 128) * n // 2 + 4 * k)  # weight, scales, zeros, group of a row
        for k, n in LINEARS.values()
    )
    names = ("qweight", "qzeros", "scales", "g_idx")
    assert sum(b.numel() * b.itemsize for name, b in module.named_buffers() if name.endswith(names)) == stored
    assert any(line.startswith("14 linear layers") for line in said)


def test_a_width_that_gptq_kernels_do_not_take_is_refused():
    spec = load("openai-community/gpt2", overrides={"num_hidden_layers": "1", "n_embd": "40", "n_head": "4"})
    with FakeTensorMode(allow_non_fake_inputs=True), casts_in_place():
        built = build(spec, dtype=torch.float16)
        with pytest.raises(UserError, match=r"40 x 120.*multiples of 32"):
            AdapterSettings(base_quant="gptq").apply(built.module, task="causal-lm", compute_dtype=torch.float16)


def test_gptq_takes_lora_only():
    with pytest.raises(UserError, match="--method oft on a base that GPTQ quantised"):
        adapted(AdapterSettings(kind="oft", base_quant="gptq"), torch.float16)


def test_a_gptq_base_is_not_run_for_real():
    spec = load("meta-llama/Llama-3.1-8B", overrides=SMALL)
    built = build(spec, dtype=torch.float16)
    with pytest.raises(CannotTell, match="run on a GPU only"):
        AdapterSettings(base_quant="gptq").apply(built.module, task="causal-lm", compute_dtype=torch.float16)


def test_embeddings_norms_and_head_stay_as_they_were_and_are_widened_for_training():
    pytest.importorskip("bitsandbytes")
    kept, _ = adapted(AdapterSettings(base_quant="nf4", upcast=False))
    wide, _ = adapted(AdapterSettings(base_quant="nf4"))
    for module, dtype in ((kept, torch.bfloat16), (wide, torch.float32)):
        base = base_of(module)
        assert base.lm_head.weight.dtype == base.model.embed_tokens.weight.dtype == base.model.norm.weight.dtype == dtype


def test_the_linear_layers_of_gpt2_are_quantised_too():
    pytest.importorskip("bitsandbytes")
    spec = load("openai-community/gpt2", overrides={"num_hidden_layers": "1"})
    with FakeTensorMode(allow_non_fake_inputs=True), casts_in_place():
        built = build(spec, dtype=torch.float32)
        module, said = AdapterSettings.of("qlora").apply(built.module, task="causal-lm", compute_dtype=torch.float32)
    assert any(line.startswith("4 linear layers") for line in said)
    assert sum(p.numel() for p in module.parameters() if p.dtype == torch.uint8) == 12 * 768 * 768 // 2


def test_a_module_of_ones_own_takes_lora_too():
    with FakeTensorMode():
        net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
        module, _ = AdapterSettings(rank=2).apply(net, task="custom", compute_dtype=torch.float32)
    assert sum(p.numel() for p in trained(module).values()) == 2 * (8 + 16) + 2 * (16 + 4)


def test_a_module_of_ones_own_is_not_quantised():
    pytest.importorskip("bitsandbytes")
    with FakeTensorMode(), pytest.raises(UserError, match="only transformers models"):
        AdapterSettings.of("qlora").apply(torch.nn.Linear(8, 8), task="custom", compute_dtype=torch.float32)


def test_an_unknown_target_is_refused_with_the_nearest_names():
    with pytest.raises(UserError, match=r"--lora-targets q_porj.*q_proj"):
        adapted(AdapterSettings(targets=("q_porj",)))


def test_a_rank_that_oft_cannot_use_is_refused_in_one_line():
    with pytest.raises(UserError) as caught:
        adapted(AdapterSettings(kind="oft", rank=7, targets=("q_proj",), modules_to_save=("nowhere",)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (AdapterSettings(kind="loar"), "lora"),
        (AdapterSettings(base_quant="nf5"), "nf4"),
        (AdapterSettings(rank=0), "--lora-rank 0"),
        (AdapterSettings(dropout=1.0), "--lora-dropout 1"),
        (AdapterSettings(kind="ia3", rank=4), "ia3 has no such setting"),
        (AdapterSettings(kind="prefix-tuning", targets=("q_proj",)), "--lora-targets"),
        (AdapterSettings(virtual_tokens=3), "--virtual-tokens"),
        (AdapterSettings(adapter_dtype="fp64"), "fp64"),
    ],
)
def test_settings_that_no_adapter_can_have_are_refused(settings, words):
    with pytest.raises(UserError, match=words):
        settings.check()


def test_what_is_made_from_the_values_of_weights_is_not_answered(monkeypatch):
    monkeypatch.setitem(KINDS, "boft", Kind(config="BOFTConfig", rank="boft_block_size"))
    with pytest.raises(CannotTell, match="boft"):
        adapted(AdapterSettings(kind="boft", targets=("q_proj",)))


def test_qlora_is_lora_on_a_base_in_nf4_with_double_quantisation():
    settings = AdapterSettings.of("qlora", rank=3)
    assert (settings.kind, settings.base_quant, settings.rank, settings.upcasts) == ("lora", "nf4-dq", 3, True)


def test_every_method_has_settings_that_pass_their_own_check():
    for method in ADAPTER_METHODS:
        AdapterSettings.of(method).check()
    assert set(KINDS) <= set(ADAPTER_METHODS)


def test_the_versions_of_the_libraries_go_with_the_settings():
    assert library_versions(None) == {}
    assert set(library_versions(AdapterSettings())) == {"peft"}
    assert set(library_versions(AdapterSettings.of("qlora"))) == {"peft", "bitsandbytes"}


@pytest.mark.parametrize(
    ("pattern", "names", "layers"),
    [
        (r".*\.(q|o)_proj", ("q_proj", "o_proj"), 2),
        (r"model\.layers\.1\..*_proj", tuple(LINEARS), 1),
        (r"model\.layers\.\d{1,2}\.mlp\..*", ("gate_proj", "up_proj", "down_proj", "act_fn"), 2),
    ],
)
def test_a_pattern_takes_the_modules_whose_whole_path_it_matches(pattern, names, layers):
    settings = AdapterSettings(rank=4, targets=(f"re:{pattern}",))
    if "act_fn" in names:
        with pytest.raises(UserError, match="peft refuses"):
            adapted(settings)
        return
    module, _ = adapted(settings)
    assert sum(p.numel() for p in trained(module).values()) == layers * sum(4 * sum(LINEARS[name]) for name in names)


@pytest.mark.parametrize(
    ("pattern", "words"),
    [("q_proj", "matches it as a whole"), ("(q_proj", "is no regular expression"), ("q_.*", "Begin it with")],
)
def test_a_pattern_that_takes_nothing_is_refused_with_the_way_out(pattern, words):
    with pytest.raises(UserError, match=words):
        adapted(AdapterSettings(targets=(f"re:{pattern}",)))


@pytest.mark.parametrize(
    ("text", "targets"), [("q_proj", ("q_proj",)), ("all-linear", ("all-linear",)), (".*_proj", ("re:.*_proj",))]
)
def test_one_text_is_a_name_or_a_pattern(text, targets):
    assert targets_of(text) == targets
