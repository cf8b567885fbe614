"""A decoder is cut into the units that a zeroth-order runtime moves, perturbs and updates one by one."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from memplan.errors import UserError
from memplan.models import ModelSpec
from memplan.models.spec import FactoryRef
from memplan.validator.runtimes.zo.blocks import find_units
from memplan.validator.runtimes.zo.lockstep import Lockstep
from memplan.validator.runtimes.zo.run import ZoRun, run_zo
from memplan.validator.zoo import find
from torch import nn
from torch.nn import functional as F

VOCAB, WIDTH = 32, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.ln(x))))


class Decoder(nn.Module):
    """Small enough that processes start in a second: no transformers."""

    def __init__(self, blocks: int = 3, tied: bool = False) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)  # registered first and called last
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, input_ids, labels):
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def build(**kwargs):
    """The factory of `plain`: every token is followed by its successor of a fixed cycle."""

    def batch(batch_size, seq_len):
        ids = torch.randint(VOCAB, (batch_size, seq_len), generator=torch.Generator().manual_seed(3))
        return {"input_ids": ids, "labels": (ids * 5 + 1) % VOCAB}

    return Decoder(**kwargs), batch


def plain(**kwargs) -> ModelSpec:
    factory = FactoryRef(path=Path(__file__), function="build", kwargs=kwargs)
    return ModelSpec(name="plain", source="factory", task="causal-lm", factory=factory)


def units_of(module):
    ids = torch.zeros(1, 4, dtype=torch.long)
    return find_units(module, lambda: module(input_ids=ids, labels=ids))


def test_units_stand_in_calling_order_whatever_the_order_of_registration():
    units = units_of(Decoder())
    assert [u.name for u in units] == ["embed", "blocks.0", "blocks.1", "blocks.2", "norm", "head"]
    assert [u.block for u in units] == [None, 0, 1, 2, None, None]
    assert [n.name for n in units[1].params] == [
        "blocks.0.ln.weight", "blocks.0.ln.bias", "blocks.0.up.weight", "blocks.0.up.bias",
        "blocks.0.down.weight", "blocks.0.down.bias",
    ]  # fmt: skip


def test_a_tied_parameter_belongs_to_the_first_unit_that_is_called():
    units = units_of(Decoder(tied=True))
    assert [n.name for n in units[0].params] == ["head.weight"]  # its first name; the embedding is called first
    assert units[-1].params == ()
    assert [n.parameter is units[0].params[0].parameter for n in units[-1].tied] == [True]


def test_frozen_parameters_move_with_their_unit_but_are_not_perturbed():
    module = Decoder()
    module.blocks[0].up.weight.requires_grad_(False)
    unit = units_of(module)[1]
    assert len(unit.tensors()) == 6
    assert "blocks.0.up.weight" not in [n.name for n in unit.params]


def test_a_model_without_a_list_of_blocks_is_refused():
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with pytest.raises(UserError, match="Sequential has no list of equal blocks to move one by one"):
        find_units(module, lambda: module(torch.zeros(1, 4)))


def test_a_block_that_shares_parameters_with_another_is_refused():
    module = Decoder()
    module.blocks[2].up.weight = module.blocks[0].up.weight
    with pytest.raises(UserError, match=r"block blocks\.2 shares blocks\.0\.up\.weight with another module"):
        units_of(module)


class Twice(Decoder):
    def forward(self, input_ids, labels):
        return super().forward(input_ids, labels) + self.norm(self.embed(input_ids)).sum()


def test_a_module_that_is_called_twice_is_refused_with_its_name():
    with pytest.raises(UserError, match="must call every module with parameters once, but calls embed 2 times, norm 2 times"):
        units_of(Twice())


class Scaled(Decoder):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))


def test_parameters_outside_of_modules_that_can_be_called_alone_are_refused():
    with pytest.raises(UserError, match="Scaled of Scaled holds parameters beside those of the modules in it"):
        units_of(Scaled())


def test_an_encoder_and_decoder_is_refused():
    with pytest.raises(UserError, match="must call every module with parameters once"):
        run_zo(ZoRun(model=find("t5").spec(), method="zo2", seq_len=8, steps=1))


# -- lockstep ------------------------------------------------------------------------------------------------------------


def each(unit, inputs):
    return [unit.forward(*args, **kwargs) for args, kwargs in inputs]


def test_streams_in_lockstep_return_what_the_model_returns_alone():
    module, batches = Decoder(), [torch.randint(VOCAB, (1, 4)) for _ in range(2)]
    alone = [module(b, b) for b in batches]
    visited = []

    def handler(unit, inputs):
        visited.append((unit.name, len(inputs)))
        return each(unit, inputs)

    steps = Lockstep(units_of(module), nullcontext)
    together = steps.run([lambda: module(batches[0], batches[0]), lambda: module(batches[1], batches[1])], handler)
    steps.remove()

    assert [t.tolist() for t in together] == [a.tolist() for a in alone]
    assert visited == [(n, 2) for n in ("embed", "blocks.0", "blocks.1", "blocks.2", "norm", "head")]
    assert module(batches[0], batches[0]).tolist() == alone[0].tolist()


def test_an_error_in_one_stream_reaches_the_caller_and_ends_the_other():
    module, ids = Decoder(), torch.zeros(1, 4, dtype=torch.long)
    steps = Lockstep(units_of(module), nullcontext)
    before = threading.active_count()
    with pytest.raises(IndexError):
        steps.run([lambda: module(ids, ids), lambda: module(ids + VOCAB, ids)], each)
    assert threading.active_count() == before


def test_streams_that_go_different_ways_are_an_error():
    module, ids = Decoder(), torch.zeros(1, 4, dtype=torch.long)
    steps = Lockstep(units_of(module), nullcontext)
    before = threading.active_count()
    with pytest.raises(RuntimeError, match="one stream is at embed, another at norm"):
        steps.run([lambda: module(ids, ids), lambda: module.norm(torch.zeros(1, WIDTH))], each)
    assert threading.active_count() == before
