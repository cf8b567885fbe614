"""The shape of a strategy, proved by three toys: ZeRO-3, ZO2 and LOMO in under 60 lines each, checked by hand.

The model of the hand calculations is a chain of square linear layers without bias: a weight is W bytes, a hidden state H bytes,
and what a step holds can be written down on one line.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator

import numpy as np
import pytest
from memplan.models import load
from memplan.planner.ledger import Component, Ledger, Tier
from memplan.planner.loop import LoopFacts
from memplan.planner.optimizers.rule import OptimizerTensor
from memplan.planner.optimizers.traced import traced_rule
from memplan.planner.simulate import Block, Simulation, simulate
from memplan.planner.strategies.base import Run, Segment, Strategy
from memplan.planner.strategies.single import SingleDevice
from memplan.planner.trace.options import TraceOptions
from memplan.planner.trace.steptrace import EventKind, Pass, Phase, StepTrace, TensorSlot
from memplan.planner.trace.tracer import trace_step

BATCH, WIDTH = 8, 64
W = WIDTH * WIDTH * 4  # bytes of one weight
H = BATCH * WIDTH * 4  # bytes of one hidden state, of the input too
SCALAR = 4  # the loss

CHAIN = """
    import torch

    def build(blocks=3, widest=64):
        linear = lambda i, o: torch.nn.Linear(i, o, bias=False)
        layers = [linear(64, 64) for _ in range(blocks - 2)] + [linear(64, widest), linear(widest, 64)]
        model = torch.nn.Sequential()
        model.blocks = torch.nn.Sequential(*layers)
        return model, lambda batch, seq: {"input": torch.ones(batch, 64)}, lambda m, b: m(**b).sum()
"""


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMPLAN_CACHE", str(tmp_path / "cache"))


def chain(tmp_path, *, blocks=3, widest=WIDTH, mode="train") -> StepTrace:
    file = tmp_path / "chain.py"
    file.write_text(textwrap.dedent(CHAIN))
    spec = load(f"{file}:build", overrides={"blocks": str(blocks), "widest": str(widest)})
    return trace_step(spec, TraceOptions(batch_size=BATCH, seq_len=1, mode=mode, target="cpu"))


def peak_in(ledger: Ledger, phase: Phase, iteration: int = 0) -> int:
    rows = ledger.rows()
    chosen = (ledger.phase[rows] == phase) & (ledger.iteration[rows] == iteration)
    return int(ledger.live_bytes()[chosen].max())


def peak_of(ledger: Ledger, component: Component, tier: Tier = Tier.GPU) -> int:
    rows = ledger.rows(tier)
    return int(np.cumsum(np.where(ledger.component[rows] == component, ledger.delta_bytes[rows], 0)).max())


# -- ZeRO-3 --------------------------------------------------------------------------------------------------------------


class ToyZero3(Strategy):
    """Every rank keeps 1/N of each parameter, gradient and state; a module's parameters are gathered while it runs."""

    name = "toy-zero3"

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.gathered: dict[str, Block] = {}
        self.grad_shards: dict[str, Block] = {}
        self.steps = 0

    def at_init(self, sim: Simulation) -> None:
        for slot in sim.trace.params:
            sim.place(Component.PARAM, slot.fqn, self.shard(slot), slot.dtype)

    def shard(self, slot: TensorSlot) -> tuple[int]:
        return (-(-slot.numel // self.world_size),)

    def before_module(self, sim: Simulation, module: int, kind: Pass) -> None:
        for slot in sim.trace.params:
            if slot.module == module:
                sim.enqueue("all_gather", slot.nbytes)
                self.gathered[slot.fqn] = sim.place(Component.COMM_BUFFER, slot.fqn, slot.shape, slot.dtype)

    def after_module(self, sim: Simulation, module: int, kind: Pass) -> None:
        for slot in sim.trace.params:
            if slot.module == module:
                sim.free(self.gathered.pop(slot.fqn))

    def grad_ready(self, sim: Simulation, param: TensorSlot, block: Block | None) -> None:
        sim.enqueue("reduce_scatter", param.nbytes)
        if param.fqn not in self.grad_shards:
            self.grad_shards[param.fqn] = sim.place(Component.GRAD, param.fqn, self.shard(param), param.dtype)
        if block is not None:
            sim.free(block)

    def step(self, sim: Simulation) -> None:
        rule = sim.optimizer.step([OptimizerTensor(self.shard(p), p.dtype) for p in sim.trace.params])
        sim.run_optimizer(rule.later if self.steps else rule.first, [p.fqn for p in sim.trace.params])
        self.steps += 1

    def zero_grad(self, sim: Simulation, set_to_none: bool) -> None:
        for block in self.grad_shards.values():
            sim.free(block)
        self.grad_shards.clear()


def zero3(trace: StepTrace, world_size: int = 4) -> tuple[Ledger, list]:
    ledger, work = simulate(trace, ToyZero3(world_size), optimizer=traced_rule("adamw", "foreach"))
    ledger.check()
    return ledger, work


def test_zero3_holds_one_gathered_weight_and_shards_of_the_rest(tmp_path):
    ledger, _ = zero3(chain(tmp_path))
    shard = W // 4
    # forward: three shards, the gathered weight, the states x h1 h2 and (running the last layer) its output
    assert peak_in(ledger, Phase.FORWARD) == 3 * shard + W + 4 * H
    # backward, the first layer's gradient being reduced: its gathered weight, its gradient, all three gradient shards; of the
    # activations only x is left; the loss, and the 1 that backward starts from
    assert peak_in(ledger, Phase.BACKWARD) == 3 * shard + W + W + 3 * shard + H + 2 * SCALAR
    # the step: shards of parameters and gradients, two states, one foreach list; the batch and the loss stay
    assert peak_in(ledger, Phase.STEP) == (3 + 3 + 6 + 3) * shard + H + SCALAR
    # later steps carry the states through backward
    assert peak_in(ledger, Phase.BACKWARD, 1) == peak_in(ledger, Phase.BACKWARD) + 6 * shard


def test_zero3_gathers_every_weight_in_forward_and_in_backward(tmp_path):
    _, work = zero3(chain(tmp_path))
    per_step = 3 * W
    assert sum(w.nbytes for w in work if w.kind == "all_gather") == 2 * 2 * per_step  # two steps
    assert sum(w.nbytes for w in work if w.kind == "reduce_scatter") == 2 * per_step


def test_zero3_releases_every_weight_that_it_gathers(tmp_path):
    ledger, _ = zero3(chain(tmp_path))
    rows = ledger.component == Component.COMM_BUFFER
    assert ledger.delta_bytes[rows].sum() == 0
    assert peak_of(ledger, Component.COMM_BUFFER) == W


def test_zero3_on_one_rank_keeps_as_much_as_a_single_device_between_steps(tmp_path):
    trace = chain(tmp_path)
    alone, _ = simulate(trace, SingleDevice(), optimizer=traced_rule("adamw", "foreach"))
    assert zero3(trace, 1)[0].live_bytes()[-1] == alone.live_bytes()[-1]


# -- ZO2 -----------------------------------------------------------------------------------------------------------------


def block_segments(trace: StepTrace, path: str) -> list[Segment]:
    """The events of an inference trace cut where a block of the list `path` is entered: before, one a block; the last one ends
    when its block is left, and what follows is `after`."""
    cuts, end = [0], len(trace.event_kind)
    names = ["before"]
    for index, (kind, arg, _) in enumerate(trace.events()):
        fqn = trace.call_fqn(arg) if kind in (EventKind.ENTER, EventKind.LEAVE) else ""
        if fqn.rpartition(".")[0] != path:
            continue
        if kind is EventKind.ENTER:
            cuts.append(index)
            names.append(fqn)
        else:
            end = index + 1
    cuts += [end, len(trace.event_kind)]
    return [Segment(name, a, b) for name, a, b in zip([*names, "after"], cuts[:-1], cuts[1:], strict=True)]


class ToyZo2(Strategy):
    """Blocks live on the host; each runs twice in a row (perturbed up and down) while the next one is uploaded."""

    name = "toy-zo2"
    path = "blocks"

    def at_init(self, sim: Simulation) -> None:
        self.blocks = [s.name for s in block_segments(sim.trace, self.path) if s.name.startswith(self.path)]
        self.nbytes = dict.fromkeys(self.blocks, 0)
        self.buffers: dict[str, Block] = {}
        self.runs = dict.fromkeys(self.blocks, 0)
        for slot in sim.trace.params:
            block = ".".join(slot.fqn.split(".")[:2])
            if block in self.nbytes:
                self.nbytes[block] += slot.nbytes
                sim.place(Component.PARAM, slot.fqn, slot.shape, slot.dtype, Tier.HOST_PINNED)
            else:
                sim.place(Component.PARAM, slot.fqn, slot.shape, slot.dtype)

    def schedule(self, trace: StepTrace, micro_batch: int) -> Iterator[Run]:
        for segment in block_segments(trace, self.path):
            for lane in (0, 1):
                yield Run(segment, Pass.FORWARD, micro_batch, lane)

    def upload(self, sim: Simulation, block: str) -> None:
        if block not in self.buffers:
            sim.enqueue("h2d", self.nbytes[block], stream=1)
            self.buffers[block] = sim.alloc(Component.OFFLOAD_BUFFER, self.nbytes[block], block, "block buffer", stream=1)

    def before_module(self, sim: Simulation, module: int, kind: Pass) -> None:
        fqn = sim.trace.modules[module].fqn
        if fqn in self.nbytes:
            place = self.blocks.index(fqn)
            for block in self.blocks[place : place + 2]:
                self.upload(sim, block)

    def after_module(self, sim: Simulation, module: int, kind: Pass) -> None:
        fqn = sim.trace.modules[module].fqn
        if fqn in self.nbytes:
            self.runs[fqn] += 1
            if self.runs[fqn] % 2 == 0:
                sim.enqueue("d2h", self.nbytes[fqn], stream=2)
                sim.free(self.buffers.pop(fqn))

    def grad_ready(self, sim: Simulation, param: TensorSlot, block: Block | None) -> None:
        raise AssertionError("a zeroth-order step has no gradient")


RESIDENT = """
    import torch

    class Net(torch.nn.Module):
        def __init__(self, blocks):
            super().__init__()
            linear = lambda: torch.nn.Linear(64, 64, bias=False)
            self.embed, self.head = linear(), linear()
            self.blocks = torch.nn.ModuleList(linear() for _ in range(blocks))

        def forward(self, x):
            x = self.embed(x)
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    def build(blocks=5):
        return Net(blocks), lambda batch, seq: {"x": torch.ones(batch, 64)}, lambda m, b: m(**b).sum()
"""


def resident_chain(tmp_path, mode="inference", blocks=5) -> StepTrace:
    file = tmp_path / "resident.py"
    file.write_text(textwrap.dedent(RESIDENT))
    spec = load(f"{file}:build", overrides={"blocks": str(blocks)})
    return trace_step(spec, TraceOptions(batch_size=BATCH, seq_len=1, mode=mode, target="cpu"))


@pytest.mark.parametrize("blocks", [2, 5, 9])
def test_zo2_peaks_at_the_resident_layers_two_blocks_and_both_lanes(tmp_path, blocks):
    ledger, _ = simulate(resident_chain(tmp_path, blocks=blocks), ToyZo2())
    ledger.check()
    # embed and head; two block buffers; the batch, shared by the lanes; while one lane's block runs it holds input and
    # output, the other lane one of the two
    assert ledger.peak_bytes() == 2 * W + 2 * W + H + 3 * H
    assert ledger.peak_bytes(Tier.HOST_PINNED) == blocks * W
    assert peak_of(ledger, Component.OFFLOAD_BUFFER) == 2 * W


def test_zo2_runs_every_block_twice_and_uploads_it_once(tmp_path):
    trace = resident_chain(tmp_path)
    ledger, work = simulate(trace, ToyZo2())
    assert [w.nbytes for w in work if w.kind == "h2d"] == [W] * 5
    made = [ledger.labels[i][0] for i in ledger.label[(ledger.component == Component.TEMP) & (ledger.delta_bytes > 0)]]
    activations = [
        ledger.labels[i][0] for i in ledger.label[(ledger.component == Component.ACTIVATION) & (ledger.delta_bytes > 0)]
    ]
    assert [fqn for fqn in made + activations if fqn.startswith("blocks")] == [f"blocks.{i}" for i in range(5) for _ in (0, 1)]


def test_the_segments_of_a_trace_cover_it_without_overlap(tmp_path):
    trace = resident_chain(tmp_path)
    segments = block_segments(trace, "blocks")
    assert [s.name for s in segments] == ["before", *(f"blocks.{i}" for i in range(5)), "after"]
    assert [s.stop for s in segments[:-1]] == [s.start for s in segments[1:]]
    assert (segments[0].start, segments[-1].stop) == (0, len(trace.event_kind))


def test_a_trace_that_is_run_in_segments_has_the_ledger_of_one_that_is_not(tmp_path):
    class InSegments(SingleDevice):
        def schedule(self, trace: StepTrace, micro_batch: int) -> Iterator[Run]:
            for segment in block_segments(trace, "blocks"):
                yield Run(segment, Pass.FORWARD, micro_batch)

    trace = resident_chain(tmp_path)
    whole, _ = simulate(trace, SingleDevice())
    cut, _ = simulate(trace, InSegments())
    assert np.array_equal(whole.delta_bytes, cut.delta_bytes)
    assert np.array_equal(whole.block, cut.block)


# -- LOMO ----------------------------------------------------------------------------------------------------------------


class ToyLomo(Strategy):
    """The update happens inside backward: a gradient is used and dropped as soon as it is there."""

    name = "toy-lomo"

    def at_init(self, sim: Simulation) -> None:
        for slot in sim.trace.params:
            sim.place(Component.PARAM, slot.fqn, slot.shape, slot.dtype)

    def grad_ready(self, sim: Simulation, param: TensorSlot, block: Block | None) -> None:
        assert block is not None
        sim.run_temporary(param.numel * 4, "fp32 update")
        sim.free(block)


def test_lomo_never_holds_more_than_the_largest_gradient(tmp_path):
    trace = chain(tmp_path, blocks=4, widest=256)
    ledger, _ = simulate(trace, ToyLomo())
    ledger.check()
    assert peak_of(ledger, Component.GRAD) == max(p.nbytes for p in trace.params) == 4 * W


def test_lomo_peaks_in_the_backward_of_the_last_layer(tmp_path):
    ledger, _ = simulate(chain(tmp_path, blocks=4), ToyLomo())
    # four weights; the last gradient and its fp32 update; x h1 h2 (h3 went with its node) and the gradient of h3; the loss, and
    # the 1 that backward starts from
    assert ledger.peak_bytes() == 4 * W + 2 * W + 4 * H + 2 * SCALAR


def test_no_gradient_of_lomo_survives_backward(tmp_path):
    trace = chain(tmp_path, blocks=4)
    ledger, _ = simulate(trace, ToyLomo())
    assert ledger.live_bytes()[-1] == sum(p.nbytes for p in trace.params) + H + SCALAR
    # plain training keeps all four
    plain, _ = simulate(trace, SingleDevice(), optimizer=traced_rule("sgd", "for-loop"))
    assert peak_of(plain, Component.GRAD) == 4 * W


# -- the interface -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("toy", [ToyZero3, ToyZo2, ToyLomo])
def test_a_toy_strategy_takes_fewer_than_60_lines(toy):
    assert len(inspect.getsource(toy).splitlines()) < 60


def test_accumulated_gradients_reach_the_strategy_once_per_micro_step(tmp_path):
    seen: list[str] = []

    class Watching(SingleDevice):
        def grad_ready(self, sim: Simulation, param: TensorSlot, block: Block | None) -> None:
            seen.append(param.fqn)
            super().grad_ready(sim, param, block)

    trace = chain(tmp_path)
    loop = LoopFacts(grad_accum_steps=3, iterations=1)
    simulate(trace, Watching(), optimizer=traced_rule("sgd", "for-loop"), loop=loop)
    assert seen == ["blocks.2.weight", "blocks.1.weight", "blocks.0.weight"] * 3


def test_packing_moves_every_saved_activation_to_the_host_and_back(tmp_path):
    class Offloading(SingleDevice):
        def pack_saved(self, sim: Simulation, storage: int, block: Block) -> Block | None:
            host = sim.alloc(Component.ACTIVATION, block.nbytes, what="saved", tier=Tier.HOST_PINNED)
            sim.free(block)
            return host

        def unpack_saved(self, sim: Simulation, storage: int, kept: Block | None, nbytes: int) -> Block:
            assert kept is not None
            sim.free(kept)
            return sim.alloc(Component.ACTIVATION, nbytes, what="loaded")

    trace = chain(tmp_path, blocks=6)
    ledger, _ = simulate(trace, Offloading(), optimizer=traced_rule("sgd", "for-loop"))
    ledger.check()
    assert ledger.peak_bytes(Tier.HOST_PINNED) == 5 * H  # h1 .. h5; the batch stays where it is
    assert ledger.live_bytes(Tier.HOST_PINNED)[-1] == 0
    # on the GPU the input and one hidden state, while its layer makes the next one
    assert peak_in(ledger, Phase.FORWARD) == 6 * W + 3 * H
