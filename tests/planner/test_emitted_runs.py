"""Folders that `--write` leaves are run as they are, on the CPU: two steps of a small model, and what ran is what was asked."""

from __future__ import annotations

import json
import math
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from memplan.models.adapters import AdapterSettings
from memplan.planner.api import make_request
from memplan.planner.engines import loss_write, recompute_write
from memplan.planner.engines.plan_file import read_written
from memplan.planner.engines.write import write_folder

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512,
    "max_position_embeddings": 256, "tie_word_embeddings": False,
}  # fmt: skip
BERT = {
    "model_type": "bert", "architectures": ["BertForSequenceClassification"], "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 512, "max_position_embeddings": 64,
}  # fmt: skip
T5 = {
    "model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2,
    "num_heads": 4, "vocab_size": 128, "decoder_start_token_id": 0,
}  # fmt: skip
VIT = {
    "model_type": "vit", "architectures": ["ViTForImageClassification"], "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32, "patch_size": 8,
}  # fmt: skip
#: Runs train.py as `__main__` would, and writes what its `main` had made into seen.RANK.json beside it.
PROBE = """
import json, os, runpy, sys

def describe(made):
    import torch
    trainer, engine = made.get("trainer"), made.get("engine")
    model = trainer.model_wrapped if trainer else engine if engine else made["model"]
    optimizer = trainer.optimizer if trainer else engine.optimizer if engine else made.get("optimizer")
    if optimizer is None:
        optimizer = next(iter(made["optimizers"].values()))
    chain = []
    while optimizer is not None and type(optimizer).__module__ != "builtins":
        chain.append(type(optimizer).__module__.partition(".")[0] + "." + type(optimizer).__name__)
        inner = getattr(optimizer, "optimizer", None)
        optimizer = inner if inner is not optimizer else None
    stage = getattr(model, "zero_optimization_stage", None)
    weights = list(model.parameters())
    locally = [getattr(w, "ds_tensor", w.to_local() if hasattr(w, "to_local") else w) for w in weights]
    offloaded = getattr(getattr(model, "optimizer", None), "cpu_offload", None) or getattr(
        getattr(model, "optimizer", None), "offload_optimizer", None)
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row] if trainer else [made["loss"].item()]
    return {
        "model": type(model).__name__, "optimizer": chain, "stage": stage() if stage else None, "offloaded": offloaded,
        "dtypes": sorted({str(w.dtype).removeprefix("torch.") for w in weights}),
        "parts": sorted({type(part).__name__ for part in model.modules()}),
        "numel": sum(w.numel() for w in locally), "trained": sum(w.numel() for w in locally if w.requires_grad),
        "grads": sum(w.grad is not None for w in weights), "losses": [float(loss) for loss in losses],
        "autocast": str(made["RUN"].get("autocast")),
    }

def main(program):
    seen = {}
    def profile(frame, event, _):
        if event == "return" and frame.f_code.co_name == "main" and frame.f_code.co_filename == program:
            sys.setprofile(None)
            seen.update(frame.f_locals)
    sys.path.insert(0, os.path.dirname(program))
    try:
        namespace = runpy.run_path(program, run_name="train")
        sys.setprofile(profile)
        namespace["main"]()
    finally:
        sys.setprofile(None)
        sys.path.pop(0)
        sys.modules.pop("recompute", None)
    with open(os.path.join(os.path.dirname(program), f"seen.{os.environ.get('RANK', '0')}.json"), "w") as file:
        json.dump(describe({**seen, "RUN": namespace["RUN"]}), file)

if __name__ == "__main__":
    program = sys.argv.pop(1)
    sys.argv[0] = program
    main(program)
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("models")
    for name, config in (("llama", LLAMA), ("bert", BERT), ("t5", T5), ("vit", VIT)):
        (place / name).mkdir()
        (place / name / "config.json").write_text(json.dumps(config))
    (place / "probe.py").write_text(PROBE)
    return place


def written(models: Path, folder: Path, *, model: str = "llama", stack: str = "auto", **options) -> Path:
    request = make_request(str(models / model), "l4", **{"seq_len": 32, "micro_batch_size": 2, **options})
    files = write_folder(request, folder, stack=stack)
    assert not files.notes or options.get("strategy", "").startswith("fsdp"), files.notes
    return folder


def here(models: Path, folder: Path, *words: str) -> dict:
    """What ran, of a program of one process, in this one."""
    program = str(folder / "train.py")
    probe = runpy.run_path(str(models / "probe.py"), run_name="probe")
    with mock.patch.dict(os.environ), mock.patch.object(sys, "argv", [program, "--steps", "2", "--random-weights", *words]):
        os.environ["ACCELERATE_USE_CPU"] = "true"
        before = os.getcwd()
        os.chdir(folder)
        try:
            probe["main"](program)
        finally:
            os.chdir(before)
    return seen(folder, 0)


def launched(models: Path, folder: Path) -> list[dict]:
    """What ran on each rank, started by the words of plan.json."""
    words = list(read_written(folder).launch)
    assert words[0] == "torchrun"
    where = words.index("train.py")
    words[where : where + 1] = [str(models / "probe.py"), str(folder / "train.py")]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *words[1:], "--steps", "2", "--random-weights"],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [seen(folder, rank) for rank in range(2)]


def seen(folder: Path, rank: int) -> dict:
    found = json.loads((folder / f"seen.{rank}.json").read_text())
    assert found["losses"]
    assert all(math.isfinite(loss) and loss > 0 for loss in found["losses"]), found["losses"]
    return found


def num_params(config: dict) -> int:
    from transformers import AutoConfig, AutoModelForCausalLM

    values = {key: value for key, value in config.items() if key != "model_type"}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **values))
    return sum(p.numel() for p in model.parameters())


# -- one process -------------------------------------------------------------------------------------------------------------


def test_a_folder_for_the_trainer_trains(models, tmp_path):
    folder = written(models, tmp_path / "run", precision="bf16-autocast", grad_accum_steps=2, recompute="full")

    found = here(models, folder)

    assert found["optimizer"] == ["accelerate.AcceleratedOptimizer", "torch.AdamW"]
    assert found["dtypes"] == ["float32"]
    assert len(found["losses"]) == 2
    assert not read_written(folder).changed()


@pytest.mark.slow
def test_a_trained_folder_reads_a_text_file(models, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    folder = written(models, tmp_path / "run", precision="fp32")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "a": 1, "b": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    (tmp_path / "text.jsonl").write_text('{"text": "a b a b"}\n' * 64)

    found = here(models, folder, "--data", str(tmp_path / "text.jsonl"))

    assert found["losses"][0] == pytest.approx(math.log(LLAMA["vocab_size"]), rel=0.1)  # untrained


def test_a_classifier_is_given_its_own_kind_of_samples(models, tmp_path):
    found = here(models, written(models, tmp_path / "run", model="bert", precision="fp32", optimizer="sgd-momentum"))

    assert found["model"] == "BertForSequenceClassification"
    assert found["optimizer"] == ["accelerate.AcceleratedOptimizer", "torch.SGD"]


@pytest.mark.parametrize("model", ["t5", "vit"])
def test_models_of_other_kinds_train_on_their_own_kind_of_samples(models, tmp_path, model):
    found = here(models, written(models, tmp_path / "run", model=model, stack="loop", precision="fp32"))

    assert len(found["losses"]) == 1


@pytest.mark.parametrize("items", [None, 40])
@pytest.mark.parametrize(
    "settings", [{"loss": "plain"}, {"loss": "shifted"}, {"loss": "chunked", "loss_chunks": 5}, {"mlp_tiles": 3}], ids=str
)
def test_a_written_loss_is_that_of_the_model(tmp_path, settings, items):
    from transformers import AutoConfig, AutoModelForCausalLM

    (tmp_path / "loss.py").write_text(loss_write.TEXT)
    change = runpy.run_path(str(tmp_path / "loss.py"))["change"]
    config = AutoConfig.for_model("llama", **{key: value for key, value in LLAMA.items() if key != "model_type"})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    ids = torch.randint(0, 512, (2, 21))
    found = []
    for changed in (False, True):
        if changed:
            change(model, settings)
        model.zero_grad()
        loss = model(input_ids=ids, labels=ids, **({"num_items_in_batch": items} if items else {})).loss
        loss.backward()
        found.append([loss.detach(), *(weight.grad.clone() for weight in model.parameters())])

    for own, theirs in zip(*found, strict=True):
        torch.testing.assert_close(theirs, own, rtol=1e-4, atol=1e-6)


def test_segments_of_blocks_that_share_more_than_hidden_states_are_not_written(models, tmp_path):
    folder = tmp_path / "run"
    files = write_folder(make_request(str(models / "t5"), "l4", seq_len=16, recompute="every-k:2"), folder)

    assert not files.launch
    assert any("hand on more than hidden states" in note for note in files.notes)


KEEPS = "keep:0=nothing/1-2=aten.mm@1+attention@0/3=all"


@pytest.mark.parametrize(
    ("model_type", "recompute"),
    [("llama", "every-k:3"), ("bert", "every-k:2"), ("llama", KEEPS), ("t5", KEEPS), ("bert", "selective-layer:2")],
)
def test_written_recompute_changes_no_gradient(tmp_path, recompute, model_type):
    import transformers

    request = make_request("openai-community/gpt2", "l4", seq_len=16, recompute=recompute)
    (tmp_path / "recompute.py").write_text(recompute_write.TEXT)
    change = runpy.run_path(str(tmp_path / "recompute.py"))["recompute"]
    made = {"llama": (LLAMA, "CausalLM"), "bert": ({**BERT, "num_hidden_layers": 4}, "SequenceClassification"),
            "t5": ({**T5, "num_layers": 4}, "Seq2SeqLM")}[model_type]  # fmt: skip
    config = transformers.AutoConfig.for_model(model_type, **{k: v for k, v in made[0].items() if k != "model_type"})
    torch.manual_seed(0)
    model = getattr(transformers, f"AutoModelFor{made[1]}").from_config(config).eval()
    ids = torch.randint(0, 100, (2, 16))
    labels = torch.tensor([0, 1]) if model_type == "bert" else ids
    found = []
    for changed in (False, True):
        if changed:
            change(model, recompute_write.recompute_settings(request))
        model.zero_grad()
        loss = (
            model(input_ids=ids, labels=labels, use_cache=False).loss
            if model_type != "bert"
            else model(ids, labels=labels).loss
        )
        loss.backward()
        found.append([loss.detach(), *(weight.grad.clone() for weight in model.parameters() if weight.grad is not None)])

    for own, theirs in zip(*found, strict=True):
        torch.testing.assert_close(theirs, own, rtol=1e-5, atol=1e-7)


def test_weights_that_are_not_there_are_said(models, tmp_path):
    folder = written(models, tmp_path / "run", precision="fp32")
    program = str(folder / "train.py")

    with mock.patch.object(sys, "argv", [program, "--steps", "1"]), pytest.raises(SystemExit, match="say --random-weights"):
        runpy.run_path(program, run_name="train")["load_model"](random_weights=False)


def test_a_lora_folder_trains_the_adapter_alone(models, tmp_path):
    pytest.importorskip("peft")
    adapter = AdapterSettings.of("lora", rank=4, targets=("q_proj", "v_proj"))
    folder = written(models, tmp_path / "run", method="lora", adapter=adapter, precision="bf16")

    found = here(models, folder)

    per_layer = 4 * (64 + 64) + 4 * (64 + 32)  # q to 64, v to two of four heads
    assert found["trained"] == LLAMA["num_hidden_layers"] * per_layer
    assert found["dtypes"] == ["bfloat16", "float32"]
    assert found["model"].startswith("PeftModel")


def test_a_qlora_folder_packs_the_base_in_4_bits(models, tmp_path):
    pytest.importorskip("peft")
    pytest.importorskip("bitsandbytes")
    folder = written(models, tmp_path / "run", method="qlora", precision="bf16", optimizer="adamw-8bit")

    found = here(models, folder)

    assert "Linear4bit" in found["parts"]
    assert "uint8" in found["dtypes"]
    assert found["optimizer"][-1].startswith("bitsandbytes.AdamW")


def test_a_loop_keeps_some_ops_and_clips(models, tmp_path):
    folder = written(
        models, tmp_path / "run", stack="loop", precision="bf16-autocast", recompute="selective-op:matmul",
        clip_grad_norm=True, grad_accum_steps=2,
    )  # fmt: skip

    found = here(models, folder)

    assert found["autocast"] == "bfloat16"
    assert found["optimizer"] == ["torch.AdamW"]
    assert "clip_grad_norm_" in (folder / "train.py").read_text()


def test_a_released_gradient_is_gone_after_backward(models, tmp_path):
    found = here(models, written(models, tmp_path / "run", precision="bf16", strategy="release"))

    assert found["grads"] == 0
    assert found["dtypes"] == ["bfloat16"]


@pytest.mark.parametrize("stack", ["trainer", "loop"])
@pytest.mark.parametrize(
    "question",
    [
        {"precision": "fp32", "recompute": "every-k:2"},
        {"precision": "fp32", "alloc_conf": "expandable_segments:True", "frozen": ("model.embed_tokens",)},
        {"precision": "fp32", "strategy": "ddp", "gpus": 2, "clip_grad_norm": True, "grad_accum_steps": 2},
        {"precision": "bf16-mixed", "strategy": "fsdp2", "gpus": 2, "recompute": "full"},
        {"precision": "bf16-mixed", "strategy": "zero3", "gpus": 2, "optimizer": "sgd"},
        {"precision": "bf16", "method": "lora", "optimizer": "adamw-8bit"},
    ],
    ids=str,
)
def test_programs_are_short_and_clean(models, tmp_path, question, stack):
    ruff = shutil.which("ruff", path=str(Path(sys.executable).parent)) or shutil.which("ruff")
    if ruff is None:
        pytest.skip("ruff is not installed")
    folder = written(models, tmp_path / "run", stack=stack, **question)
    rules = ["--isolated", "--select", "E,F,W,B", "--line-length", "128"]

    done = subprocess.run([ruff, "check", *rules, "."], cwd=folder, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout
    assert len((folder / "train.py").read_text().splitlines()) < 160
    assert "memplan" not in (folder / "train.py").read_text()


# -- two processes ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("stack", ["trainer", "loop"])
def test_ddp_keeps_the_model_whole(models, tmp_path, stack):
    for found in launched(models, written(models, tmp_path / "run", stack=stack, strategy="ddp", gpus=2, precision="fp32")):
        assert found["model"] == "DistributedDataParallel"
        assert found["numel"] == num_params(LLAMA)


@pytest.mark.slow
@pytest.mark.parametrize("stack", ["trainer", "loop"])
def test_fsdp2_shards_every_weight_in_fp32(models, tmp_path, stack):
    found = launched(
        models,
        written(models, tmp_path / "run", stack=stack, strategy="fsdp2", gpus=2, precision="bf16-mixed", grad_accum_steps=2),
    )

    assert sum(one["numel"] for one in found) == num_params(LLAMA)
    for one in found:
        assert one["dtypes"] == ["float32"]
        assert one["model"].startswith("FSDP")


@pytest.mark.slow
def test_fsdp1_flattens_every_block(models, tmp_path):
    found = launched(models, written(models, tmp_path / "run", strategy="fsdp1", gpus=2, precision="bf16-mixed"))

    assert found[0]["model"] == "FullyShardedDataParallel"
    assert found[0]["numel"] < 0.6 * num_params(LLAMA)


@pytest.mark.slow
def test_qlora_under_fsdp1_shards_what_is_packed(models, tmp_path):
    pytest.importorskip("peft")
    pytest.importorskip("bitsandbytes")
    folder = written(models, tmp_path / "run", method="qlora", strategy="fsdp1", gpus=2, precision="bf16-mixed")

    for found in launched(models, folder):
        assert found["model"] == "FullyShardedDataParallel"
        assert "Linear4bit" in found["parts"]
        assert found["numel"] < 0.6 * num_params(LLAMA)


@pytest.mark.slow
@pytest.mark.parametrize("stack", ["trainer", "loop"])
def test_zero3_partitions_every_weight(models, tmp_path, stack):
    pytest.importorskip("deepspeed")
    folder = written(models, tmp_path / "run", stack=stack, strategy="zero3", gpus=2, precision="bf16-mixed")

    for found in launched(models, folder):
        assert (found["model"], found["stage"]) == ("DeepSpeedEngine", 3)
        assert found["optimizer"][-1] == "torch.AdamW"
        assert num_params(LLAMA) / 2 <= found["numel"] < 0.51 * num_params(LLAMA)  # halves, some padded


@pytest.mark.slow
def test_zero2_keeps_its_optimizer_on_the_host(models, tmp_path):
    pytest.importorskip("deepspeed")
    folder = written(models, tmp_path / "run", strategy="zero2", gpus=2, precision="bf16-mixed", offload=("optimizer",))

    for found in launched(models, folder):
        assert (found["model"], found["stage"], found["offloaded"]) == ("DeepSpeedEngine", 2, True)
