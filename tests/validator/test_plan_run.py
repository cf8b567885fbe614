"""`validate --plan`: the folder that `--write` left is run as it is, measured and compared, or refused in one line."""

import json
import sys
from pathlib import Path

import pytest
import torch
from memplan.__main__ import main
from memplan.errors import CannotTell, UserError
from memplan.planner.api import make_request
from memplan.planner.engines.plan_file import hashes, read_written
from memplan.planner.engines.write import write_folder
from memplan.planner.trace.source import TraceSource
from memplan.validator.launch import Ended
from memplan.validator.loop import Running
from memplan.validator.plan_run import _outcomes, check, command_of, launch, run_plan
from memplan.validator.plan_worker import Phases
from memplan.validator.ranks import predicted_of

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512,
    "max_position_embeddings": 256, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    place = tmp_path_factory.mktemp("model")
    (place / "config.json").write_text(json.dumps(LLAMA))
    return str(place)


def written(model, folder: Path, stack: str = "auto", **options) -> Path:
    request = make_request(model, "l4", **{"seq_len": 32, "micro_batch_size": 2, "precision": "fp32", **options})
    write_folder(request, folder, stack=stack)
    return folder


def with_program(folder: Path, text: str) -> Path:
    """The folder with another program, as if it had been written so."""
    (folder / "train.py").write_text(text)
    data = json.loads((folder / "plan.json").read_text())
    data["files"] |= hashes({"train.py": text})
    (folder / "plan.json").write_text(json.dumps(data))
    return folder


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory) -> Path:
    return written(model, tmp_path_factory.mktemp("out") / "run")


def test_a_folder_runs_as_it_was_written_and_agrees(model, tmp_path, capsys):
    place = written(model, tmp_path / "run", precision="bf16-autocast")
    before = sorted(file.name for file in place.iterdir())

    found = run_plan(place, device="cpu", traces=TraceSource())

    assert found.reason == ""
    assert found.agrees
    assert found.peak.within(0.005)
    wrong = [row for row in found.rows if not row.within(0.02)]
    assert not wrong
    assert {"param", "grad", "optimizer_state", "peak", "after"} <= {row.what for row in found.rows}
    assert all(row.difference_bytes == 0 for row in found.rows if row.what in ("param", "grad", "optimizer_state"))
    assert sorted(file.name for file in place.iterdir()) == before  # what the run writes goes elsewhere


KEEPS = "keep:0=nothing/1=aten.mm@0+aten.mm@4+attention@0/2=all"


@pytest.mark.parametrize(
    ("stack", "recompute"),
    [
        ("trainer", KEEPS),
        *(pytest.param(stack, recompute, marks=pytest.mark.slow) for stack, recompute in [
            ("loop", KEEPS), ("loop", "every-k:2"), ("trainer", "every-k:2"), ("trainer", "selective-layer:2"),
            ("loop", "selective-op:matmul+attention"), ("trainer", "selective-op:attention"),
        ]),
    ],
)  # fmt: skip
def test_what_blocks_keep_is_what_was_predicted(model, tmp_path, stack, recompute):
    place = written(model, tmp_path / "run", stack=stack, recompute=recompute, seq_len=64, micro_batch_size=16)

    found = run_plan(place, device="cpu", traces=TraceSource())

    assert found.reason == ""
    assert found.peak.within(0.002)
    assert not [row for row in found.rows if not row.within(0.02) and row.phase != "init"]  # batches are there by then


LIGER = """
from memplan.models.tiled import fused_linear_cross_entropy

class LigerFusedLinearCrossEntropyLoss:
    def __init__(self, reduction):
        self.reduction = reduction

    def __call__(self, weight, hidden, labels, bias):
        loss = fused_linear_cross_entropy(hidden, weight, labels, bias)
        return loss if self.reduction == "mean" else loss * (labels != -100).sum()
"""


@pytest.mark.parametrize(
    ("stack", "options"),
    [
        ("loop", {"loss": "chunked:3"}),
        *(pytest.param(stack, options, marks=pytest.mark.slow) for stack, options in [
            ("trainer", {"loss": "chunked"}), ("trainer", {"loss": "plain"}), ("loop", {"loss": "plain"}),
            ("trainer", {"loss": "shifted"}), ("trainer", {"loss": "liger"}), ("loop", {"loss": "liger"}),
            ("trainer", {"mlp_tiles": 4}), ("loop", {"mlp_tiles": 4, "loss": "chunked", "recompute": "full"}),
        ]),
    ],
    ids=str,
)  # fmt: skip
def test_another_loss_is_what_the_folder_computes(model, tmp_path, monkeypatch, stack, options):
    """liger-kernel needs a GPU: what stands in for it holds what its kernel does."""
    (tmp_path / "stub" / "liger_kernel").mkdir(parents=True)
    (tmp_path / "stub" / "liger_kernel" / "__init__.py").write_text("")
    (tmp_path / "stub" / "liger_kernel" / "transformers.py").write_text(LIGER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "stub"))
    place = written(model, tmp_path / "run", stack=stack, seq_len=64, micro_batch_size=16, **options)

    found = run_plan(place, device="cpu", traces=TraceSource())

    assert found.reason == ""
    assert found.peak.within(0.002)


@pytest.mark.parametrize(
    ("library", "optimizer", "allowed"),
    [
        ("torch", "muon", 0.002),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [
            ("adam_mini", "adam-mini:dim=64,n_heads=4", 0.002),
            ("galore_torch", "galore-adamw:rank=8", 0.06),  # the rule has the solver's own copy of a matrix
            ("galore_torch", "galore-adafactor:rank=8", 0.06),
            ("apollo_torch", "apollo-adamw:rank=8", 0.03),  # and a later step that projects anew, which two steps have not
            ("apollo_torch", "apollo-mini", 0.03),
            ("badam", "badam", 0.002),
            ("lion_pytorch", "lion", 0.002),
            ("prodigyopt", "prodigy", 0.005),
            ("schedulefree", "schedule-free-sgd", 0.002),
            ("transformers", "hf-adafactor", 0.002),
        ]),
    ],
)  # fmt: skip
def test_an_optimizer_of_a_library_is_made_and_steps_as_predicted(model, tmp_path, library, optimizer, allowed):
    pytest.importorskip(library)
    more = {"method": "badam"} if optimizer == "badam" else {}
    sizes = {"precision": "bf16", "seq_len": 16, "micro_batch_size": 1}
    place = written(model, tmp_path / "run", stack="loop", optimizer=optimizer, **sizes, **more)

    found = run_plan(place, device="cpu", traces=TraceSource())

    assert found.reason == ""
    assert found.peak.within(allowed)
    assert not [row for row in found.rows if row.what in ("param", "grad") and not row.within(allowed)]


OWN = """
import torch
from torch import nn
from width import WIDTH

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

def build(depth=4):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(*(Block() for _ in range(depth))))
    return model, lambda batch, seq: {"input": torch.randn(batch, seq, WIDTH)}, lambda m, b: m(**b).float().square().mean()

def llama():
    from transformers import LlamaConfig, LlamaForCausalLM
    sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4, vocab_size=512)
    return LlamaForCausalLM(LlamaConfig(**sizes))
"""


@pytest.mark.parametrize(
    ("function", "options"),
    [
        ("build", {"precision": "bf16", "recompute": "full", "clip_grad_norm": True, "grad_accum_steps": 2}),
        *(pytest.param(function, options, marks=pytest.mark.slow) for function, options in [
            ("llama", {"recompute": "full"}),
            ("build", {"precision": "bf16", "strategy": "release", "recompute": "every-k:2", "frozen": ("1.0.",)}),
            ("build", {"precision": "bf16-autocast", "strategy": "ddp", "gpus": 2}),
            ("build", {"precision": "bf16-mixed", "strategy": "fsdp2", "gpus": 2}),
            ("build", {"precision": "bf16-mixed", "strategy": "zero3", "gpus": 2, "recompute": "full"}),
        ]),
    ],
    ids=str,
)  # fmt: skip
def test_a_model_of_the_users_own_code_is_trained_as_predicted(tmp_path, function, options):
    if options.get("strategy") == "zero3":
        pytest.importorskip("deepspeed")
    (tmp_path / "net.py").write_text(OWN)
    (tmp_path / "width.py").write_text("WIDTH = 32\n")
    own = {"overrides": {"depth": "6"}} if function == "build" else {}
    place = written(f"{tmp_path / 'net.py'}:{function}", tmp_path / "run", seq_len=64, micro_batch_size=8, **own, **options)

    found = run_plan(place, device="cpu", traces=TraceSource())

    assert found.reason == ""
    assert found.peak.within(0.002)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp1", "fsdp2", "zero2"])
def test_a_folder_of_several_ranks_runs_by_its_own_launcher(model, tmp_path, strategy):
    if strategy.startswith("zero"):
        pytest.importorskip("deepspeed")
    place = written(model, tmp_path / "run", strategy=strategy, gpus=2, precision="fp32" if strategy == "ddp" else "bf16-mixed")

    found = run_plan(place, device="cpu", traces=TraceSource())

    assert found.reason == ""
    assert [rank.rank for rank in found.ranks] == [0, 1]
    assert found.agrees


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_under_fsdp2_accelerates_units_are_answered_for(tmp_path, tied):
    place = tmp_path / "wide"
    place.mkdir()
    (place / "config.json").write_text(json.dumps({**LLAMA, "vocab_size": 1024, "tie_word_embeddings": tied}))
    asked = {"strategy": "fsdp2", "gpus": 2, "precision": "bf16-mixed", "seq_len": 64, "micro_batch_size": 8}
    plain = make_request(str(place), "l4", **asked)
    folder = written(str(place), tmp_path / "run", **asked)

    found = run_plan(folder, device="cpu", traces=TraceSource())

    assert found.peak.within(0.002)
    without = predicted_of(plain.but(rank=0, iterations=2), TraceSource().step(plain, target="cpu"), "cpu").peak_bytes
    assert without > 1.004 * found.peak.measured_bytes  # the root would have held both to the end


def test_the_words_that_were_written_are_started_by_this_python():
    worker = ["-m", "memplan.validator.plan_worker", "train.py"]
    assert command_of(("python", "train.py")) == [sys.executable, *worker]
    words = ("torchrun", "--standalone", "--nproc-per-node", "2", "train.py", "--data", "x")
    assert command_of(words) == [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *worker, "--data", "x",
    ]  # fmt: skip
    assert "accelerate.commands.accelerate_cli" in command_of(("accelerate", "launch", "train.py"))
    with pytest.raises(CannotTell, match="only python, torchrun and accelerate"):
        command_of(("mpirun", "train.py"))


@pytest.mark.parametrize("how", ["changed", "missing"])
def test_a_file_that_is_not_as_it_was_written_is_refused(model, tmp_path, how):
    place = written(model, tmp_path / "run")
    file = place / "training_args.json"
    file.write_text(file.read_text() + " ") if how == "changed" else file.unlink()
    with pytest.raises(UserError, match=r"training_args\.json: missing, or not as written"):
        run_plan(place, device="cpu")


def test_a_plan_of_a_newer_version_is_refused_in_one_line(model, tmp_path, capsys):
    place = written(model, tmp_path / "run")
    data = json.loads((place / "plan.json").read_text())
    (place / "plan.json").write_text(json.dumps({**data, "format": 99}))
    assert main(["validate", "--plan", str(place)]) == 2
    said = capsys.readouterr().err.strip()
    assert "format 99 was written by a newer memplan" in said
    assert "\n" not in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--plan", "nowhere"], "cannot read"),
        (["gpt2", "--plan", "x"], "--plan takes no MODEL"),
        (["--plan", "x", "--processes"], "--processes does not go with --plan"),
        (["--plan", "x", "--steps", "0"], "--steps 0"),
    ],
)
def test_what_cannot_be_used_is_one_line(words, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["validate", *words]) == 2
    line = capsys.readouterr().err.strip()
    assert said in line
    assert "\n" not in line


def test_a_folder_without_a_program_and_one_of_several_machines_are_refused(folder):
    from dataclasses import replace

    plan = read_written(folder)
    check(plan)
    with pytest.raises(CannotTell, match=r"no train\.py"):
        check(replace(plan, launch=()))
    with pytest.raises(CannotTell, match="2 machines"):
        check(replace(plan, request=replace(plan.request, gpus=2, nodes=2)))


def test_a_program_that_raises_is_an_outcome(model, tmp_path):
    place = with_program(written(model, tmp_path / "run"), "raise ValueError('no such table')\n")
    found = launch(read_written(place), "cpu", [], timeout_s=120)[0]
    assert found.usage is None
    assert found.reason == "the run raised ValueError: no such table"


@pytest.mark.slow
def test_a_program_that_hangs_is_stopped(model, tmp_path):
    place = with_program(written(model, tmp_path / "run"), "import time\n\n\ndef waits():\n    time.sleep(600)\n\n\nwaits()\n")
    found = launch(read_written(place), "cpu", [], timeout_s=12)[0]
    assert found.usage is None
    assert found.reason.startswith("the run took longer than 12 s and was stopped (--timeout); it was in waits (train.py:5)")


def test_a_program_that_finds_no_memory_says_where(model, tmp_path):
    text = "import torch\nmodel = torch.nn.Linear(4, 4)\nmodel(torch.ones(1, 4))\ntorch.empty(1 << 52)\n"
    place = with_program(written(model, tmp_path / "run"), text)
    found = launch(read_written(place), "cpu", [], timeout_s=120)[0]
    assert found.reason.startswith("the run ran out of host memory in the forward pass of step 1: it asked for")
    assert "live: weights 80 B" in found.reason


def test_ranks_without_an_answer_were_stopped_after_the_one_that_failed(tmp_path):
    answers = [tmp_path / f"rank-{n}.json" for n in range(3)]
    answers[2].write_text(json.dumps({"usage": None, "reason": "late", "at": 9.0}))
    answers[1].write_text(json.dumps({"usage": None, "reason": "the cause", "at": 5.0}))
    found = _outcomes(answers, Ended(reason="the run ended with exit code 1"))
    assert [outcome.reason for outcome in found] == [
        "stopped, because another process of the run had failed", "the cause", "late",
    ]  # fmt: skip
    assert min(range(3), key=lambda n: found[n].order) == 1


def phases_of(*, steps, clear_first=False, accumulate=1, checkpoint=False):
    """What `Phases` tells of a plain loop."""
    seen = []
    running = Running()
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    with Phases(lambda phase, iteration: seen.append((phase, iteration)), running).watching():
        for _ in range(steps):
            if clear_first:
                optimizer.zero_grad()
            for _ in range(accumulate):
                x = torch.ones(2, 4)
                if checkpoint:
                    out = torch.utils.checkpoint.checkpoint(model, x.requires_grad_(), use_reentrant=False)
                else:
                    out = model(x)
                out.sum().backward()
            optimizer.step()
            if not clear_first:
                model.zero_grad()
    assert running.module is model
    assert running.optimizer is optimizer
    return [mark for mark in seen if mark[0] not in ("between", "end")]


@pytest.mark.parametrize("clear_first", [False, True])
@pytest.mark.parametrize("checkpoint", [False, True])
def test_phases_of_a_loop_are_told_apart(clear_first, checkpoint):
    wanted = [(phase, n) for n in range(3) for phase in ("forward", "backward", "step")]
    assert phases_of(steps=3, clear_first=clear_first, checkpoint=checkpoint) == wanted


def test_micro_steps_belong_to_one_step():
    assert phases_of(steps=2, accumulate=2) == [
        ("forward", 0), ("backward", 0), ("forward", 0), ("backward", 0), ("step", 0),
        ("forward", 1), ("backward", 1), ("forward", 1), ("backward", 1), ("step", 1),
    ]  # fmt: skip


def test_torch_is_as_it_was_when_the_program_is_over():
    before = torch.Tensor.backward, torch.optim.Optimizer.zero_grad, torch.nn.Module.zero_grad
    phases_of(steps=1)
    assert (torch.Tensor.backward, torch.optim.Optimizer.zero_grad, torch.nn.Module.zero_grad) == before
