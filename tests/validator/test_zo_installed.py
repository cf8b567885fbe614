"""zo2 itself behind the same question: what it is told, what is read back, and what it is not asked."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace

import pytest
import torch
from memplan.errors import CannotTell, UserError
from memplan.models import ModelSpec
from memplan.validator.runtimes.zo import installed
from memplan.validator.runtimes.zo.distzo2 import Layout
from memplan.validator.runtimes.zo.measure import StorageRecorder
from memplan.validator.runtimes.zo.run import ZoRun
from torch import nn

OPT = {"model_type": "opt", "vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "max_position_embeddings": 32}


def question(config=OPT, **options):
    spec = ModelSpec(name="a model", source="folder", task="causal-lm", config=config)
    return ZoRun(**{"model": spec, "method": "zo2", "seq_len": 8, "micro_batch_size": 2, **options})


def test_a_missing_zo2_is_named_with_its_home(monkeypatch):
    monkeypatch.setitem(sys.modules, "zo2", None)
    with pytest.raises(UserError, match=r"zo2 cannot be imported: .*Install it as github.com/liangyuwang/zo2 says"):
        installed.run_installed(question())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"config": {**OPT, "model_type": "llama"}}, "zo2 trains opt and qwen3, not llama"),
        ({"method": "distzo2", "layout": Layout(data_size=2)}, "zo2 runs mezo and zo2 on one GPU"),
        ({"loss": "plain"}, "zo2 runs mezo and zo2 on one GPU, with its own loss"),
    ],
)
def test_what_zo2_cannot_do_is_said_before_it_is_looked_for(options, message):
    with pytest.raises(CannotTell, match=message):
        installed.run_installed(question(**options))


def command(*words):
    from memplan import __main__ as command_line

    return command_line.main(["validate", *words, "--precision", "fp16", "--seq", "64", "--runtime", "zo2", "--no-record"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("facebook/opt-125m --method zo2", "zo2 cannot be imported: "),
        ("gpt2 --method zo2", "zo2 trains opt and qwen3, not gpt2"),
        ("facebook/opt-125m --method distzo2 --gpus 2", "zo2 runs --method mezo and zo2, on one GPU"),
        ("facebook/opt-125m --method zo2 --freeze model.decoder.embed", "trains the whole model"),
    ],
)
def test_the_command_says_in_one_line_why_zo2_does_not_run(monkeypatch, capsys, words, message):
    monkeypatch.setitem(sys.modules, "zo2", None)

    assert command(*words.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.count("\n") == 1


def test_without_a_gpu_zo2_is_not_started(monkeypatch, capsys):
    monkeypatch.setattr(installed, "_modules", lambda kind, method: (ModuleType("zo2"), ModuleType("config")))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    assert command("facebook/opt-125m", "--method", "zo2") == 2
    assert "zo2 needs a GPU: torch finds none" in capsys.readouterr().err


def test_what_zo2_measures_is_compared_with_the_prediction(monkeypatch, capsys):
    """A made-up measurement stands in for a GPU's: it differs, and that is said."""
    from memplan.validator.measurement import PhaseBytes, Usage

    asked = []

    def run_installed(run):
        asked.append(run)
        phase = PhaseBytes(phase="forward", step="later", peak_bytes=10**9, after_bytes=10**8)
        usage = Usage(counter="allocated", phases=(phase,), components={})
        return SimpleNamespace(ranks=(SimpleNamespace(usage=lambda: usage),))

    monkeypatch.setattr(installed, "run_installed", run_installed)
    code = command("facebook/opt-125m", "--method", "zo2", "--zo-offload-blocks", "3", "--json")

    found = json.loads(capsys.readouterr().out)
    assert (code, found["outcome"]) == (1, "differs")
    assert (asked[0].offloaded_blocks, asked[0].precision, asked[0].device) == ((0, 1, 2), "fp16", "cuda")
    assert found["question"]["loss"] == "shifted"


@dataclass
class Settings:
    """The fields of zo2's MeZOSGDConfig (0.1.1) that matter here: another one is a TypeError, as in zo2."""

    lr: float = 1e-3
    weight_decay: float = 1e-1
    eps: float = 1e-3
    zo2: bool = True
    offloading_blocks: list | None = None
    working_device: str = "cuda"
    overlap: bool = True
    communicate_optimize_method: str = ""
    amp: bool = False
    precision_on_offloading_device: torch.dtype = torch.float16


class StandIn(nn.Module):
    """Answers as zo2's model classes do."""

    def __init__(self, config):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(config.hidden_size))
        self.config, self.seeds = config, []
        StandIn.last = self

    def zo_init(self, settings):
        self.settings, self.opt = settings, SimpleNamespace(projected_grad=0.0)

    def zo_train(self):
        self.eval()

    def forward(self, input_ids, labels, **seed):
        assert input_ids is labels
        self.seeds.append((tuple(input_ids.shape), seed))
        self.opt.projected_grad = 2.0
        return torch.tensor(5.0)


def run(**options):
    module, config = ModuleType("model"), ModuleType("config")
    module.OPTForCausalLM, config.MeZOSGDConfig = StandIn, Settings
    return installed._run(question(**options), (module, config), StorageRecorder(), "cpu"), StandIn.last


def test_zo2_is_told_the_question_in_its_own_words():
    _, model = run(offloaded_blocks=(1,), communication="bucket", overlap=False, lr=0.5, eps=0.25, weight_decay=0.0)
    assert model.settings == Settings(
        lr=0.5, weight_decay=0.0, eps=0.25, offloading_blocks=[1], working_device="cpu", overlap=False,
        communicate_optimize_method="bucket",
    )  # fmt: skip
    assert not model.training
    assert model.config._attn_implementation == "sdpa"


def test_a_transfer_dtype_becomes_zo2s_mixed_precision():
    _, model = run(precision="bf16-autocast", transfer_dtype="bfloat16")
    assert (model.settings.amp, model.settings.precision_on_offloading_device) == (True, torch.bfloat16)
    assert model.weight.dtype == torch.float32


@pytest.mark.parametrize(("method", "word"), [("zo2", "seed"), ("mezo", "zo_random_seed")])
def test_every_step_has_its_seed_under_the_name_that_the_method_takes(method, word):
    _, model = run(method=method, steps=2, seed=4)
    assert model.seeds == [((2, 8), {word: 5}), ((2, 8), {word: 6})]
    assert model.settings.zo2 is (method == "zo2")


def test_losses_and_gradients_are_read_back_and_the_dtype_is_restored():
    found, model = run(precision="bf16", steps=2, keep_parameters=True)
    assert found.losses == ((5.0, 5.0 - 2 * 1e-3 * 2.0),) * 2
    assert found.projected_grads == (2.0, 2.0)
    assert [(p.step, p.kind) for p in found.ranks[0].phases] == [(-1, "init"), (0, "forward"), (1, "forward")]
    assert found.ranks[0].parameters["weight"].dtype == model.weight.dtype == torch.bfloat16
    assert torch.get_default_dtype() == torch.float32
