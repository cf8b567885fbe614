"""`load`: every kind of reference, and a clear line for every way to get one wrong."""

import ast
import json
import struct
import subprocess
import sys

import pytest
from memplan.errors import UserError
from memplan.models import check_sizes, load
from memplan.models.spec import max_seq_len

TINY = {"model_type": "llama", "vocab_size": 99, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 2, "max_position_embeddings": 64}  # fmt: skip


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def error(*args, **kwargs):
    with pytest.raises(UserError) as caught:
        load(*args, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def heavy_imports_of(code):
    names = "{'torch', 'transformers', 'numpy', 'pydantic', 'huggingface_hub'}"
    code = f"import sys\nfrom memplan.models import build, check_sizes, load\n{code}\nprint(sorted({names} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return ast.literal_eval(done.stdout.splitlines()[-1])


def test_loading_from_the_catalogue_or_a_folder_imports_neither_torch_nor_transformers(tmp_path):
    write(tmp_path / "config.json", TINY)
    code = f"""
a, b = load('bert-base-uncased'), load({str(tmp_path)!r})
c = load('gpt2', overrides={{'num_hidden_layers': '2'}})
a.fingerprint, b.fingerprint, c.fingerprint, check_sizes(c, 1, 8)
"""
    assert heavy_imports_of(code) == []


def test_loading_a_factory_imports_no_torch_even_where_the_factory_does(tmp_path):
    file = write(tmp_path / "net.py", "import torch\ndef build(): ...")
    assert heavy_imports_of(f"load('{file}:build').fingerprint") == []


def test_the_check_for_heavy_imports_sees_them():
    assert "transformers" in heavy_imports_of("load('gpt2', overrides={'summary_activation': 'tanh'})")


def test_a_catalogue_entry_becomes_a_spec():
    spec = load("meta-llama/Llama-3.1-8B")
    assert (spec.source, spec.task, spec.num_params) == ("catalogue", "causal-lm", 8_030_261_248)
    assert (spec.max_seq_len, spec.model_type, spec.factory) == (131_072, "llama", None)


def test_a_folder_and_its_config_file_are_the_same_model(tmp_path):
    file = write(tmp_path / "mine" / "config.json", TINY)
    folder, direct = load(str(file.parent)), load(str(file))
    assert (folder.source, folder.name, folder.task) == ("folder", "mine", "causal-lm")
    assert folder.fingerprint == direct.fingerprint


def test_the_index_of_a_folder_gives_the_parameter_count(tmp_path):
    write(tmp_path / "config.json", TINY)
    write(tmp_path / "model.safetensors.index.json", {"metadata": {"total_parameters": 123}, "weight_map": {}})
    assert load(str(tmp_path)).num_params == 123


def test_the_header_of_a_weights_file_gives_the_parameter_count(tmp_path):
    write(tmp_path / "config.json", TINY)
    header = json.dumps({"__metadata__": {"format": "pt"}, "a": {"dtype": "F32", "shape": [3, 4], "data_offsets": [0, 48]},
                         "b": {"dtype": "F32", "shape": [], "data_offsets": [48, 52]}}).encode()  # fmt: skip
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(52))
    assert load(str(tmp_path)).num_params == 13


def test_the_headers_of_all_shards_are_added(tmp_path):
    write(tmp_path / "config.json", TINY)
    write(
        tmp_path / "model.safetensors.index.json",
        {"metadata": {"total_size": 8}, "weight_map": {"a": "1.safetensors", "b": "2.safetensors"}},
    )
    for name, size in (("1", 2), ("2", 5)):
        header = json.dumps({name: {"dtype": "F32", "shape": [size], "data_offsets": [0, 4 * size]}}).encode()
        (tmp_path / f"{name}.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4 * size))
    assert load(str(tmp_path)).num_params == 7


def test_a_broken_weights_file_is_named(tmp_path):
    write(tmp_path / "config.json", TINY)
    (tmp_path / "model.safetensors").write_bytes(b"not a safetensors file")
    assert "model.safetensors: not a safetensors file" in error(str(tmp_path))


def test_a_folder_without_a_config_says_so(tmp_path):
    assert "has no config.json" in error(str(tmp_path))


def test_an_adapter_folder_names_its_base_model(tmp_path):
    write(tmp_path / "adapter_config.json", {"base_model_name_or_path": "meta-llama/Llama-2-7b-hf"})
    assert "holds an adapter, not a model. Name meta-llama/Llama-2-7b-hf" in error(str(tmp_path))


def test_invalid_json_is_reported_with_its_line(tmp_path):
    file = write(tmp_path / "config.json", '{\n  "model_type": "llama",\n  oops\n}')
    assert f"{file}: not valid JSON at line 3" in error(str(file))


def test_a_config_that_is_no_object_is_refused(tmp_path):
    assert "expected a JSON object, got a list" in error(str(write(tmp_path / "config.json", "[1]")))


def test_a_missing_config_file_is_named():
    assert "no file nowhere/config.json" in error("nowhere/config.json")


def test_a_config_without_a_model_type_says_what_to_add(tmp_path):
    file = write(tmp_path / "config.json", {"architectures": ["LlamaForCausalLM"], "hidden_size": 8})
    assert 'has no model_type. Add "model_type", for example "llama" (its class is LlamaForCausalLM)' in error(str(file))


def test_an_unknown_model_type_offers_the_nearest(tmp_path):
    message = error(str(write(tmp_path / "config.json", {"model_type": "lama"})))
    assert "no model_type 'lama'" in message
    assert "llama" in message


def test_a_model_with_its_own_code_asks_for_leave_to_run_it(tmp_path):
    config = {"model_type": "homemade", "auto_map": {"AutoConfig": "code.Config"}}
    file = write(tmp_path / "config.json", config)
    assert "--trust-remote-code" in error(str(file))
    assert load(str(file), trust_remote_code=True).trust_remote_code


def test_an_empty_reference_is_refused():
    assert "the reference is empty" in error("  ")


def test_a_path_that_does_not_exist_is_refused_without_asking_the_hub():
    assert "no such folder or file: ./a/b/c" in error("./a/b/c")


def test_a_python_file_without_a_function_is_refused(tmp_path):
    assert "names a Python file, but no function in it" in error(str(tmp_path / "train.py"))


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        ({"model_type": "bert", "max_position_embeddings": 512}, 512),
        ({"model_type": "roberta", "max_position_embeddings": 514, "pad_token_id": 1}, 512),
        ({"model_type": "gpt2", "n_positions": 1024}, 1024),
        ({"model_type": "t5", "n_positions": 512}, None),
        ({"model_type": "bloom", "seq_length": 2048}, None),
        ({"model_type": "mpt", "max_seq_len": 2048, "attn_config": {"alibi": True}}, None),
        ({"model_type": "whisper", "max_source_positions": 1500, "max_target_positions": 448}, 448),
        ({"model_type": "gemma3", "text_config": {"max_position_embeddings": 131072}}, 131072),
        ({"model_type": "vit", "image_size": 224}, None),
    ],
)
def test_the_position_limit_follows_the_family(config, limit):
    assert max_seq_len(config) == limit


@pytest.mark.parametrize(("batch", "seq"), [(0, 8), (-1, 8), (1, 0), (1, -5)])
def test_sizes_below_one_are_refused(batch, seq):
    with pytest.raises(UserError, match="expected 1 or more, got"):
        check_sizes(load("gpt2"), batch, seq)


def test_a_sequence_beyond_the_positions_says_the_limit_and_how_to_raise_it():
    check_sizes(load("gpt2"), 1, 1024)
    with pytest.raises(UserError, match=r"positions for 1024 tokens, got 1025.*--set n_positions=1025"):
        check_sizes(load("gpt2"), 1, 1025)


def test_the_advice_for_a_longer_sequence_works():
    with pytest.raises(UserError, match="--set max_position_embeddings=1026") as caught:
        check_sizes(load("roberta-base"), 1, 1024)
    key, _, value = str(caught.value).rpartition("--set ")[2].partition("=")
    check_sizes(load("roberta-base", overrides={key: value}), 1, 1024)


def test_the_fingerprint_changes_with_the_config_and_with_the_task():
    prints = {
        load("bert-base-uncased").fingerprint,
        load("bert-base-uncased", task="token-classification").fingerprint,
        load("bert-base-uncased", overrides={"num_hidden_layers": "3"}).fingerprint,
    }
    assert len(prints) == 3


def test_an_unknown_task_offers_the_nearest():
    assert "task: 'causallm' is not known. Did you mean causal-lm" in error("gpt2", task="causallm")


def test_audio_is_a_task_chosen_by_the_architecture():
    assert load("openai/whisper-tiny", task="audio").task == "speech-seq2seq"
    assert load("facebook/wav2vec2-base", task="audio").task == "ctc"


@pytest.mark.parametrize(
    ("config", "task"),
    [
        ({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}, "causal-lm"),
        ({"model_type": "bert", "architectures": ["BertForTokenClassification"]}, "token-classification"),
        ({"model_type": "bert", "architectures": ["BertForPreTraining"]}, "masked-lm"),
        ({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}, "seq2seq-lm"),
        ({"model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"]}, "speech-seq2seq"),
        (
            {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "vision_config": {}},
            "image-text-to-text",
        ),
        ({"model_type": "hubert", "architectures": ["HubertForCTC"]}, "ctc"),
        ({"model_type": "swin", "architectures": ["SwinForImageClassification"]}, "image-classification"),
        ({"model_type": "llama", "vocab_size": 8}, "causal-lm"),
        ({"model_type": "detr", "architectures": ["DetrForObjectDetection"]}, "auto"),
    ],
)
def test_the_default_task_follows_the_class_or_the_family(tmp_path, config, task):
    assert load(str(write(tmp_path / "config.json", config))).task == task
