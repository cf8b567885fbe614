"""Training by zo_run.json: what `memplan fit --method mezo|zo2|distzo2 --write` leaves, run for as many steps as wanted.

One process a GPU, started by torchrun where there are several; without a GPU the processes train on the CPU over gloo.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ....errors import UserError
from ....models import load
from ....planner.engines.zo_file import ZoFile, architecture, read
from ...loop import _to_device
from .distzo2 import DistZo2
from .measure import NoRecorder
from .mezo import Mezo
from .perturb import Step
from .run import Rank, ZoRun
from .zo2 import Zo2

_LINES = 20  # steps between two lines of progress, after the first ones


@dataclass(frozen=True, kw_only=True)
class Training:
    """What is asked beside the file."""

    steps: int = 100
    data: str | None = None
    """A text file, or JSON Lines with a key `text`; None: one batch of made-up tokens."""
    random_weights: bool = False
    save: str | None = None
    device: str = "auto"


@dataclass(frozen=True)
class Result:
    """Of every step, the losses at +eps and -eps of the whole batch."""

    losses: tuple[tuple[float, float], ...]


def train(path: str, training: Training, say: Callable[[str], None] = print) -> Result:
    """Trains as `path`, a zo_run.json, says.  Raises UserError for what the file or the command gets wrong."""
    file = read(path)
    device = _device(training.device)
    run = run_of(file, path, steps=training.steps, device=device)
    run.check()
    rank, world_size, local = (int(os.environ.get(name, default)) for name, default in _ENVIRONMENT)
    if world_size != run.world_size:
        raise UserError(
            f"{path} is for {run.world_size} processes, and this is one of {world_size}",
            f"Start it with torchrun --standalone --nproc-per-node {run.world_size}" if run.world_size > 1 else "Use python",
        )
    if world_size > 1 and not dist.is_initialized():
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
    try:
        return _Trainer(file, run, rank, local, training, say if rank == 0 else lambda line: None).train()
    finally:
        if world_size > 1:
            dist.destroy_process_group()


_ENVIRONMENT = (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"))  # as torchrun sets them


def run_of(file: ZoFile, path: str, *, steps: int, device: str) -> ZoRun:
    """The file as the runtime's own description; the architecture is config.json beside it."""
    spec = load(str(architecture(path)), task=file.task)
    names = (
        "precision",
        "micro_batch_size",
        "seq_len",
        "attention",
        "loss",
        "frozen",
        "adapter",
        "eps",
        "weight_decay",
        "seed",
    )
    same = {name: getattr(file, name) for name in names}
    return ZoRun.asked(spec, file.method, file.zo, steps=steps, lr=float(file.lr), device=device, **same)


def _device(wanted: str) -> str:
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch finds no GPU", "Use --device cpu")
    return ("cuda" if torch.cuda.is_available() else "cpu") if wanted == "auto" else wanted


class _Trainer:
    """One process."""

    def __init__(self, file: ZoFile, run: ZoRun, rank: int, local: int, training: Training, say: Callable[[str], None]) -> None:
        self.file, self.run, self.training, self.say = file, run, training, say
        self.rank = Rank(run, rank, NoRecorder(), gpu=local)
        self.module: Any = self.rank.built.module
        if not training.random_weights:
            self._load()

    def train(self) -> Result:
        run, built = self.run, self.rank.built
        rows = run.micro_batch_size * run.layout.data_size
        made = built.make_batch(rows, run.seq_len)
        batches = self._batches(made, rows)
        engine = self.rank.engine(self.rank.units())
        batch: dict[str, Any] = {}

        def loss() -> Tensor:
            return built.step(self.module, batch)

        losses = []
        self.say(f"{run.method}: {run.world_size} x {self.rank.device.type}, {rows} rows of {run.seq_len} tokens a step")
        try:
            for number in range(run.steps):
                start = time.monotonic()
                batch = _to_device(self.rank.part(next(batches)), str(self.rank.device))
                pair, grad = engine.step(
                    loss, Step(run.seed + 1 + number, run.learning_rate(number), run.eps, run.weight_decay)
                )
                losses.append(pair)
                if number < _LINES or (number + 1) % _LINES == 0:
                    took = time.monotonic() - start
                    self.say(f"step {number + 1}: loss {sum(pair) / 2:.4f}, projected gradient {grad:.4g}, {took:.3f} s")
            engine.flush()
        finally:
            engine.close()
        if self.rank.device.type == "cuda":
            self.say(f"peak of this GPU: {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB allocated")
        if self.training.save is not None:
            self._save(engine, self.training.save)
        return Result(tuple(losses))

    def _load(self) -> None:
        """The weights that the file names, into the model as it was built."""
        if self.file.adapter is not None:
            raise UserError(
                "pretrained weights under an adapter are not loaded by this runtime", "Say --random-weights to try the run"
            )
        kind = type(self.module)
        try:
            made = kind.from_pretrained(self.file.model, config=self.module.config, dtype=next(self.module.parameters()).dtype)
        except (OSError, ValueError) as error:
            why = str(error).strip().splitlines()[0]
            raise UserError(
                f"the weights of {self.file.model} cannot be loaded: {why}",
                "Name a folder that holds them, or say --random-weights",
            ) from error
        self.module.load_state_dict(made.state_dict(), assign=True)
        self.module.tie_weights()

    def _batches(self, made: Mapping[str, Any], rows: int) -> Iterator[Mapping[str, Any]]:
        """The same for every process, again and again."""
        if self.training.data is None:
            while True:
                yield made
        ids = _tokens(self.training.data, self.file)
        size = rows * self.run.seq_len
        ids = ids.repeat(-(-size // len(ids)))
        batches = ids[: len(ids) // size * size].view(-1, rows, self.run.seq_len)
        while True:
            for batch in batches:
                yield {**made, "input_ids": batch, "labels": batch.clone()}

    def _save(self, engine: Mezo | Zo2 | DistZo2, folder: str) -> None:
        """The whole model, from the units' copies; the last update is in them."""
        names = {id(p): name for name, p in self.module.named_parameters(remove_duplicate=False)}
        weights = {}
        for unit in engine.visit():  # every process has to: slices are gathered
            for p in unit.tensors():
                if self.rank.rank == 0:
                    weights[names[id(p)]] = p.detach().cpu().clone()
        if self.rank.rank == 0:
            weights |= {n: b.detach().cpu() for n, b in self.module.state_dict(keep_vars=True).items() if id(b) not in names}
            self.module.save_pretrained(folder, state_dict=weights)
            self.say(f"wrote {folder}")


def _tokens(path: str, file: ZoFile) -> Tensor:
    """The ids of all the text, one after another."""
    from transformers import AutoTokenizer

    if file.task != "causal-lm":
        raise UserError(f"--data with a model for {file.task}", "Text alone trains causal language models: leave it out")
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"--data {path}: {error.strerror}", "Name a text file, or leave it out") from error
    if path.endswith(".jsonl"):
        try:
            text = "\n".join(json.loads(line)["text"] for line in text.splitlines() if line.strip())
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"--data {path}: a line is no object with a key text", "Correct it, or give plain text") from error
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(file.model)
    except (OSError, ValueError) as error:
        raise UserError(f"the tokenizer of {file.model} cannot be loaded", "Leave --data out for made-up tokens") from error
    ids: Tensor = tokenizer(text, return_tensors="pt").input_ids[0]
    if not len(ids):
        raise UserError(f"--data {path}: no tokens in it", "Name a file with text")
    return ids
