"""A question that was written as JSON is read back as the same question, or refused with the place that is wrong."""

import json
from dataclasses import replace

import pytest
from memplan.errors import UserError
from memplan.models.adapters import AdapterSettings
from memplan.planner.api import make_request
from memplan.planner.question import request_of
from memplan.planner.request import Request
from memplan.planner.strategies.deepspeed_settings import DeepSpeedSettings, OffloadOptimizer
from memplan.planner.strategies.fsdp_settings import FsdpSettings
from memplan.planner.strategies.zo_settings import ZoSettings

GPT2 = "openai-community/gpt2"
QUESTIONS = {
    "plain": (GPT2, {}),
    "a GPU of the user's own size": (GPT2, {"gpu_memory": "12GiB", "overrides": {"n_layer": "2"}}),
    "loop facts": (GPT2, {"grad_accum_steps": 4, "clip_grad_norm": True, "frozen": ("transformer.wte",)}),
    "DeepSpeed": (
        "meta-llama/Llama-3.1-8B",
        {
            "gpus": 8,
            "nodes": 2,
            "strategy": "zero3",
            "offload": ("optimizer:nvme",),
            "rank": 3,
            "deepspeed": DeepSpeedSettings(
                reduce_bucket_size=5, offload_optimizer=OffloadOptimizer(device="nvme", nvme_path="/x", ratio=1)
            ),
        },
    ),
    "FSDP": (GPT2, {"gpus": 2, "strategy": "fsdp1", "fsdp": FsdpSettings(version=1), "host_ram_bytes": 1 << 38}),
    "zeroth order": (GPT2, {"method": "zo2", "zo": ZoSettings(bucket=True, offloading_blocks=3)}),
    "adapter": (GPT2, {"method": "lora", "adapter": AdapterSettings(rank=8, targets=("c_attn",), dropout=0.1)}),
}


def ask(name: str) -> Request:
    model, options = QUESTIONS[name]
    return make_request(model, "l4", **options)


def written(request: Request) -> dict:
    data: dict = json.loads(json.dumps(request.as_data()))
    return data


@pytest.mark.parametrize("name", QUESTIONS)
def test_what_was_written_is_read_back_as_the_same_question(name: str) -> None:
    request = ask(name)
    again = request_of(written(request), "plan.json")
    assert replace(again, defaults=()) == replace(request, defaults=())
    assert again.model.config == request.model.config
    assert again.device == request.device


def test_a_model_of_a_folder_is_found_from_another_folder(tmp_path, monkeypatch) -> None:
    (tmp_path / "tiny").mkdir()
    config = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4, "architectures": ["GPT2LMHeadModel"]}
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path)
    request = make_request("tiny", "l4")
    monkeypatch.chdir("/")
    assert request_of(written(request), "plan.json").model == request.model


def test_a_factory_is_found_from_another_folder(tmp_path, monkeypatch) -> None:
    (tmp_path / "mine.py").write_text("def build(width=8):\n    import torch\n    return torch.nn.Linear(width, width)\n")
    monkeypatch.chdir(tmp_path)
    request = make_request("mine.py:build", "l4", overrides={"width": "16"})
    monkeypatch.chdir("/")
    again = request_of(written(request), "plan.json")
    assert again.model.factory is not None
    assert again.model.factory.kwargs == {"width": 16}


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("gpus", "x", "question.gpus: 'x'"),
        ("gpus", True, "question.gpus: True"),
        ("newer_knob", 1, "question.newer_knob: is not known to this memplan"),
        ("loop", {"newer": 1}, "question.loop.newer: is not known"),
        ("loop", {"zero_grad": "never"}, "question.loop.zero_grad: 'never'"),
        ("deepspeed", {"reduce_bucket_size": "a"}, "question.deepspeed.reduce_bucket_size: 'a'"),
        ("offload", [1], r"question.offload\[0\]: 1"),
        ("overrides", {"n_layer": 2}, "question.overrides.n_layer: 2"),
        ("gpu", "l5", "Unknown GPU 'l5'"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(key: str, value: object, said: str) -> None:
    with pytest.raises(UserError, match=said):
        request_of({**written(ask("plain")), key: value}, "plan.json")


def test_a_missing_part_is_said() -> None:
    data = written(ask("plain"))
    del data["gpu"]
    with pytest.raises(UserError, match=r"question\.gpu: is missing"):
        request_of(data, "plan.json")
