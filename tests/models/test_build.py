"""`build` and `make_batch`: tiny versions of the catalogue's families take a real training step; large ones a fake one."""

import pytest
import torch
from memplan.errors import UserError
from memplan.models import build, load
from memplan.models.batch import ordinary_ids
from memplan.models.builder import make_config, num_params
from torch._subclasses.fake_tensor import FakeTensorMode

_LAYERS = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 101}
_TWO_STACKS = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32,
               "encoder_attention_heads": 2, "decoder_attention_heads": 2}  # fmt: skip
TINY = {
    "bert-base-uncased": _LAYERS,
    "microsoft/deberta-v3-small": {**_LAYERS, "pooler_hidden_size": 16},
    "gpt2": {"n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 101, "eos_token_id": 100, "bos_token_id": 100},
    "facebook/opt-125m": {"num_hidden_layers": 2, "hidden_size": 16, "word_embed_proj_dim": 16, "num_attention_heads": 2,
                          "ffn_dim": 32, "vocab_size": 101},
    "bloom-560m": {"n_layer": 2, "hidden_size": 16, "n_head": 2, "vocab_size": 101},
    "llama-3.1-8b": {**_LAYERS, "num_key_value_heads": 1, "bos_token_id": 1, "eos_token_id": 2},
    "mixtral-8x7b": {**_LAYERS, "num_key_value_heads": 1},
    "google/flan-t5-small": {"num_layers": 2, "num_decoder_layers": 2, "d_model": 16, "d_ff": 32, "num_heads": 2, "d_kv": 8,
                             "vocab_size": 101},
    "facebook/bart-base": {**_TWO_STACKS, "vocab_size": 101},
    "google/vit-base-patch16-224": {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2,
                                    "intermediate_size": 32, "image_size": 32},
    "microsoft/resnet-50": {"hidden_sizes": [8, 8, 8, 8], "depths": [1, 1, 1, 1], "embedding_size": 8},
    "openai/whisper-tiny": {**_TWO_STACKS, "encoder_layers": 1, "decoder_layers": 1},
    "facebook/wav2vec2-base": {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 32,
                               "conv_dim": [8] * 7, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 4},
    "openai/clip-vit-base-patch32": {"text_config.num_hidden_layers": 1, "vision_config.num_hidden_layers": 1},
}  # fmt: skip


def tiny(name, task=None, dtype=torch.float32, attention="sdpa", **more):
    overrides = {key: str(value) for key, value in {**TINY[name], **more}.items()}
    return build(load(name, task=task, overrides=overrides), dtype=dtype, attention=attention)


def trains(built, seq_len=12):
    """Takes a real step and checks that each trainable parameter that must has a gradient."""
    loss = built.step(built.module, built.make_batch(2, seq_len))
    assert loss.ndim == 0
    assert torch.isfinite(loss)
    loss.backward()
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in built.module.parameters())
    return loss


@pytest.mark.parametrize("name", TINY)
def test_each_family_takes_a_real_step_with_its_default_task(name):
    built = tiny(name)
    assert built.module.training
    trains(built, seq_len=16000 if "wav2vec2" in name else 12)


@pytest.mark.parametrize("task", ["masked-lm", "seq-classification", "token-classification", "question-answering"])
@pytest.mark.parametrize("name", ["bert-base-uncased", "microsoft/deberta-v3-small"])
def test_an_encoder_trains_on_each_of_its_tasks(name, task):
    trains(tiny(name, task))


@pytest.mark.parametrize("name", ["gpt2", "llama-3.1-8b", "google/flan-t5-small", "facebook/bart-base"])
def test_models_of_other_kinds_can_classify_sequences(name):
    trains(tiny(name, "seq-classification"))


def test_a_decoder_that_classifies_gets_a_pad_token_and_a_note():
    built = tiny("gpt2", "seq-classification")
    assert built.module.config.pad_token_id == 0
    assert "pad_token_id is set to 0" in built.notes[0]
    assert (built.make_batch(2, 8)["input_ids"] != 0).all()


@pytest.mark.parametrize(("labels", "dtype"), [(1, torch.float32), (3, torch.long)])
def test_labels_follow_the_number_of_classes(labels, dtype):
    built = tiny("bert-base-uncased", "seq-classification", num_labels=labels)
    assert built.make_batch(4, 8)["labels"].dtype == dtype
    trains(built)


def test_a_multi_label_problem_has_float_labels():
    built = tiny("bert-base-uncased", "seq-classification", num_labels=3, problem_type="multi_label_classification")
    assert built.make_batch(4, 8)["labels"].shape == (4, 3)
    trains(built)


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("gpt2", {"input_ids", "labels"}),
        ("llama-3.1-8b", {"input_ids", "labels"}),
        ("bert-base-uncased", {"input_ids", "attention_mask", "token_type_ids", "labels"}),
        ("google/flan-t5-small", {"input_ids", "attention_mask", "labels"}),
        ("google/vit-base-patch16-224", {"pixel_values", "labels"}),
        ("openai/whisper-tiny", {"input_features", "labels"}),
        ("facebook/wav2vec2-base", {"input_values", "labels"}),
        ("openai/clip-vit-base-patch32", {"input_ids", "attention_mask", "pixel_values"}),
    ],
)
def test_a_batch_holds_what_the_usual_loader_hands_over(name, keys):
    assert set(tiny(name).make_batch(2, 16000 if "wav2vec2" in name else 8)) == keys


def test_batches_have_the_sizes_that_were_asked_for():
    assert tiny("gpt2").make_batch(3, 7)["input_ids"].shape == (3, 7)
    t5 = tiny("google/flan-t5-small").make_batch(3, 7, target_len=5)
    assert (t5["input_ids"].shape, t5["labels"].shape) == ((3, 7), (3, 5))
    assert tiny("google/vit-base-patch16-224").make_batch(3, 1)["pixel_values"].shape == (3, 3, 32, 32)
    assert tiny("microsoft/resnet-50").make_batch(3, 1, image_size=64)["pixel_values"].shape == (3, 3, 64, 64)
    whisper = tiny("openai/whisper-tiny").make_batch(3, 7)
    assert (whisper["input_features"].shape, whisper["labels"].shape) == ((3, 80, 3000), (3, 7))


def test_an_image_size_that_the_positions_do_not_fit_is_refused():
    with pytest.raises(UserError, match=r"positions for 32 px, got 64\. Build it for that size with --set image_size=64"):
        tiny("google/vit-base-patch16-224").make_batch(1, 1, image_size=64)


def test_too_little_sound_is_refused():
    with pytest.raises(UserError, match="100 samples of sound are too few"):
        tiny("facebook/wav2vec2-base").make_batch(1, 100)


def test_batches_are_the_same_every_time_and_hold_no_special_id():
    built = tiny("bert-base-uncased")
    first, second = built.make_batch(4, 64), built.make_batch(4, 64)
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert 0 < first["input_ids"].min() <= first["input_ids"].max() < 101


def test_ordinary_ids_are_the_widest_range_without_special_ones():
    class Config:
        vocab_size, pad_token_id, bos_token_id, eos_token_id = 100, 0, 5, [90, 95]

    assert ordinary_ids(Config()) == (6, 90)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_parameters_and_float_inputs_have_the_dtype(dtype):
    built = tiny("google/vit-base-patch16-224", dtype=dtype)
    assert {p.dtype for p in built.module.parameters()} == {dtype}
    assert built.make_batch(1, 1)["pixel_values"].dtype == dtype


def test_t5_keeps_the_weights_in_fp32_that_from_pretrained_keeps_there():
    half = tiny("google/flan-t5-small", dtype=torch.float16).module
    kept = {name.split(".")[-2] for name, p in half.named_parameters() if p.dtype == torch.float32}
    assert kept == {"wo"}
    assert {p.dtype for p in tiny("google/flan-t5-small", dtype=torch.bfloat16).module.parameters()} == {torch.bfloat16}


def test_flan_t5_has_a_head_of_its_own_and_t5_does_not():
    flan = tiny("google/flan-t5-small").module
    assert flan.lm_head.weight is not flan.shared.weight
    with torch.device("meta"):
        t5 = build(load("t5-small"), dtype=torch.float32).module
    assert t5.lm_head.weight is t5.shared.weight


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_attention_that_was_asked_for_is_built(attention):
    built = tiny("llama-3.1-8b", attention=attention)
    assert (built.attention, built.module.config._attn_implementation) == (attention, attention)
    assert built.notes == []


def test_an_attention_that_the_model_lacks_falls_back_with_a_note():
    built = tiny("microsoft/deberta-v3-small")
    assert built.attention == "eager"
    assert built.notes == ["attention: deberta-v2 does not support sdpa, so it is built with eager"]


def test_a_convolutional_network_says_nothing_about_attention():
    assert tiny("microsoft/resnet-50").notes == []


def test_flash_attention_that_is_not_installed_falls_back_with_a_note():
    pytest.importorskip("transformers")
    from transformers.utils import is_flash_attn_2_available

    if is_flash_attn_2_available():
        pytest.skip("flash-attn is installed here")
    built = tiny("llama-3.1-8b", attention="flash_attention_2")
    assert built.attention == "sdpa"
    assert "flash_attention_2 is not installed here" in built.notes[0]


def test_an_unknown_attention_is_refused():
    with pytest.raises(UserError, match=r"attention: 'fast' is not known\. Choose one of sdpa, eager, flash_attention_2"):
        tiny("gpt2", attention="fast")


def test_a_task_that_the_family_lacks_names_those_it_has():
    with pytest.raises(UserError, match=r"transformers has no seq2seq-lm head for bert\. Choose one of causal-lm, masked-lm"):
        tiny("bert-base-uncased", "seq2seq-lm")


@pytest.mark.parametrize("name", ["meta-llama/Llama-3.1-405B", "google/gemma-3-4b-pt", "facebook/convnext-tiny-224",
                                  "facebook/wav2vec2-base", "openai/whisper-large-v3", "t5-11b"])  # fmt: skip
def test_a_large_model_takes_a_fake_step_without_memory(name):
    spec = load(name)
    with FakeTensorMode():
        built = build(spec, dtype=torch.bfloat16)
        assert num_params(built.module) == spec.num_params
        loss = built.step(built.module, built.make_batch(1, 16000 if "wav2vec2" in name else 16))
        loss.backward()
    assert loss.shape == ()


def test_tied_weights_stay_tied_under_a_fake_mode():
    with FakeTensorMode():
        module = build(load("gpt2"), dtype=torch.float32).module
    assert module.lm_head.weight is module.transformer.wte.weight


def test_a_multimodal_model_says_that_its_batch_is_text_only():
    with torch.device("meta"):
        built = build(load("google/gemma-3-4b-pt"), dtype=torch.float32)
    assert "text only" in built.notes[0]


def test_an_architecture_without_a_task_of_ours_is_built_as_its_config_names_it(tmp_path):
    config = (
        '{"model_type": "segformer", "architectures": ["SegformerForSemanticSegmentation"], "hidden_sizes": [8, 8, 8, 8],'
        ' "depths": [1, 1, 1, 1], "num_attention_heads": [1, 1, 1, 1], "decoder_hidden_size": 8}'
    )
    (tmp_path / "config.json").write_text(config)
    built = build(load(str(tmp_path)), dtype=torch.float32)
    assert type(built.module).__name__ == "SegformerForSemanticSegmentation"
    trains(built)


def test_how_a_checkpoint_is_stored_does_not_decide_how_it_is_built(tmp_path):
    config = (
        '{"model_type": "llama", "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 16,'
        ' "vocab_size": 50, "torch_dtype": "bfloat16", "quantization_config": {"quant_method": "gptq", "bits": 4}}'
    )
    (tmp_path / "config.json").write_text(config)
    built = build(load(str(tmp_path)), dtype=torch.float32)
    assert {p.dtype for p in built.module.parameters()} == {torch.float32}


def test_an_index_that_disagrees_with_the_config_is_noted(tmp_path):
    config = '{"model_type": "llama", "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 50}'
    (tmp_path / "config.json").write_text(config)
    (tmp_path / "model.safetensors.index.json").write_text('{"metadata": {"total_parameters": 5}, "weight_map": {}}')
    with torch.device("meta"):
        built = build(load(str(tmp_path)), dtype=torch.float32)
    assert "states 5 parameters, the config builds" in built.notes[0]


def test_overrides_reach_the_config_object():
    assert make_config(load("gpt2", overrides={"num_hidden_layers": "3"})).num_hidden_layers == 3
