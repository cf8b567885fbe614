"""Batches and constructors of families that are built or fed in an unusual way."""

import pytest
import torch
from memplan.errors import UserError
from memplan.models import ModelSpec, build
from torch._subclasses.fake_tensor import FakeTensorMode

ENCODER = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}


def spec_of(model_type, task, config):
    return ModelSpec(name=model_type, source="folder", task=task, config={"model_type": model_type, **config})


def built(model_type, task="auto", fake=False, **config):
    spec = spec_of(model_type, task, config)
    if not fake:
        return build(spec, dtype=torch.float32)
    with FakeTensorMode(allow_non_fake_inputs=True):
        return build(spec, dtype=torch.float32)


def test_a_family_with_several_classes_for_a_task_is_built_without_named_architectures():
    assert type(built("deit", "image-classification", **ENCODER).module).__name__ == "DeiTForImageClassification"


def test_a_constructor_that_casts_its_parts_can_be_built_without_memory():
    sizes = {"vocab_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16, "head_dim": 8}
    pytest.importorskip("transformers.models.deepseek_v4")
    module = built("deepseek_v4", "causal-lm", fake=True, **sizes, q_lora_rank=8, n_routed_experts=2).module
    assert module.model.layers[0].self_attn.q_a_norm.weight.dtype == torch.float32
    assert torch.nn.Linear(2, 2).to(torch.bfloat16).weight.dtype == torch.bfloat16  # torch's own way is back


def test_an_image_tower_whose_class_does_not_name_its_input_gets_pixels():
    made = built("idefics3_vision", **ENCODER, image_size=32, patch_size=16)
    assert {name: tuple(value.shape) for name, value in made.make_batch(2, 8).items()} == {"pixel_values": (2, 3, 32, 32)}


def test_a_speech_encoder_by_itself_gets_no_labels():
    made = built("parakeet_encoder", **ENCODER, num_mel_bins=20)
    assert {name: tuple(value.shape) for name, value in made.make_batch(2, 8).items()} == {"input_features": (2, 32, 20)}


def test_a_codec_gets_sound_with_channels():
    made = built("mimi", fake=True)
    assert tuple(made.make_batch(2, 4000)["input_values"].shape) == (2, 1, 4000)


def test_a_model_that_takes_more_than_a_config_tells_is_refused_by_the_names_of_its_inputs():
    made = built("qwen2_vl", "auto", fake=True)
    assert "input_ids" in made.make_batch(1, 8)
    with pytest.raises(UserError, match="seggpt: forward needs prompt_masks, prompt_pixel_values, which the config"):
        built("seggpt", fake=True).make_batch(1, 8)


def saved_by_ctc(fake):
    """Bytes of everything that autograd keeps of the loss alone, and of its logits' gradient."""
    config = {**ENCODER, "vocab_size": 20, "conv_dim": [8, 8], "conv_kernel": [10, 4], "conv_stride": [5, 4],
              "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "num_feat_extract_layers": 2}  # fmt: skip
    kept = []

    def pack(tensor):
        kept.append(tuple(tensor.shape))
        return tensor

    mode = FakeTensorMode(allow_non_fake_inputs=True) if fake else None
    made = built("wav2vec2", "ctc", fake=fake, **config)
    batch = made.make_batch(2, 400, target_len=5)
    if mode is not None:
        mode = next(made.module.parameters()).fake_mode
        batch = {name: mode.from_tensor(value) for name, value in batch.items()}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        if mode is None:
            made.step(made.module, batch)
        else:
            with mode:
                made.step(made.module, batch)
    return kept


def test_the_stand_in_for_ctc_keeps_the_lattice_that_the_real_loss_keeps():
    real, stand_in = saved_by_ctc(fake=False), saved_by_ctc(fake=True)
    lattice = (2, 19, 2 * 5 + 1)
    assert real.count(lattice) == stand_in.count(lattice) == 1
    assert (10,) in real
    assert (10,) in stand_in
