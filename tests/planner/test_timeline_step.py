from __future__ import annotations

import dataclasses
import textwrap

import pytest
from memplan.hardware import catalogue
from memplan.planner.api import make_request
from memplan.planner.loop import LoopFacts
from memplan.planner.optimizers.traced import traced_rule
from memplan.planner.predict import simulated
from memplan.planner.simulate import HOST, WAIT, simulate
from memplan.planner.strategies.ddp import DistributedDataParallel
from memplan.planner.strategies.fsdp2 import Fsdp2Settings, FullyShard
from memplan.planner.strategies.single import SingleDevice
from memplan.planner.timeline.export import repeated, write_trace
from memplan.planner.timeline.roofline import MATMUL, OpTable, best_matmul_share, coefficients
from memplan.planner.timeline.step_time import StepPlan, step_time
from memplan.planner.trace.source import TraceSource
from memplan.planner.trace.steptrace import Pass

WIDTH, BLOCKS = 2048, 6

MODEL = f"""
    import torch

    def chain():
        model = torch.nn.Sequential(*(torch.nn.Linear({WIDTH}, {WIDTH}, bias=False) for _ in range({BLOCKS})))
        model = torch.nn.Sequential(*[model])
        return model, lambda batch, seq: {{"input": torch.ones(batch * seq, {WIDTH})}}, lambda m, b: m(**b).sum()
"""


@pytest.fixture(scope="module")
def source():
    return TraceSource(exact=True)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    file = tmp_path_factory.mktemp("net") / "net.py"
    file.write_text(textwrap.dedent(MODEL))
    return file


def request_of(file, gpu="a100-80gb", **options):
    options = {"micro_batch_size": 4, "seq_len": 1024, "precision": "bf16", "optimizer_impl": "fused", **options}
    return make_request(f"{file}:chain", gpu, **options)


def planned(source, request, strategy, **more):
    trace = source.step(request)
    rule = traced_rule("adamw", "fused")
    ledger, work = simulate(trace, strategy, optimizer=rule, loop=request.loop)
    return trace, ledger, work, StepPlan(request, trace, ledger, work, **more)


def timed(source, request, strategy, **more):
    trace, ledger, work, _ = planned(source, request, strategy)
    return step_time(request, trace, ledger, work, **more)


def test_one_gpu_computes_and_steps(source, file):
    found = timed(source, request_of(file), SingleDevice())

    assert set(found.busy_s) == {"host", "compute"}
    assert found.bound_by == "compute"
    assert found.tokens_per_s == pytest.approx(4 * 1024 / found.seconds)
    assert 0 < found.typical_error < 0.3
    assert sum(found.compute_s.values()) == pytest.approx(found.busy_s["compute"])
    assert sum(found.critical_s.values()) == pytest.approx(found.seconds)


def test_products_take_their_operations_over_what_the_card_reaches(source, file):
    request = request_of(file)
    trace, _, _, plan = planned(source, request, SingleDevice())
    c, device = coefficients(), request.device
    flops = trace.flops
    fastest = flops / (device.peak_flops("bf16") * best_matmul_share(device) * c.matmul)

    assert fastest < plan.compute_s()["matmul"] < 1.5 * fastest


def test_a_small_step_waits_for_the_host(source, file):
    found = timed(source, request_of(file, "h100", micro_batch_size=1, seq_len=8), SingleDevice())
    slow = dataclasses.replace(coefficients(), host_op=1e-3)
    assert timed(source, request_of(file, micro_batch_size=1, seq_len=8), SingleDevice(), c=slow).bound_by == "host"
    assert found.seconds < 1e-3


def test_twice_the_micro_steps_take_twice_the_compute_but_one_optimizer_step(source, file):
    one = timed(source, request_of(file), SingleDevice())
    two = timed(source, request_of(file, grad_accum_steps=2), SingleDevice())

    assert two.compute_s["matmul"] == pytest.approx(2 * one.compute_s["matmul"])
    assert two.compute_s["optimizer"] == pytest.approx(one.compute_s["optimizer"])
    assert one.seconds < two.seconds < 2 * one.seconds


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "ddp"},
        {"strategy": "zero2", "precision": "bf16-mixed"},
        {"strategy": "zero3", "precision": "bf16-mixed", "offload": ("optimizer", "param")},
        {"strategy": "fsdp2"},
        {"strategy": "fsdp1", "recompute": "full"},
    ],
)
def test_a_log_without_its_middle_micro_step_is_that_of_a_loop_with_one_less(source, file, options):
    three, two = (request_of(file, gpus=4, grad_accum_steps=steps, **options) for steps in (3, 2))
    trace = source.step(three)
    long, short = simulated(three, trace), simulated(two, trace)
    work = long.work.without(micro_step=1)

    assert len(work) == len(short.work)
    assert [ran.run.segment for ran in work.runs] == [ran.run.segment for ran in short.work.runs]
    assert step_time(two, trace, long.ledger, work) == step_time(two, trace, short.ledger, short.work)
    assert step_time(three, trace, long.ledger, long.work).seconds > step_time(two, trace, short.ledger, short.work).seconds


def test_an_optimizer_that_launches_an_op_at_a_time_takes_three_times_the_passes(source, file):
    fused = timed(source, request_of(file), SingleDevice()).compute_s["optimizer"]
    foreach = timed(source, request_of(file, optimizer_impl="foreach"), SingleDevice()).compute_s["optimizer"]

    assert foreach == pytest.approx(fused * 22 / 7)


def test_ddp_hides_its_all_reduce_behind_the_backward_but_the_last_bucket(source, file):
    request = request_of(file, gpus=8, strategy="ddp")
    alone = timed(source, request_of(file), SingleDevice())
    found = timed(source, request, DistributedDataParallel(8))

    lane = found.busy_s["nvlink"]
    assert alone.seconds < found.seconds < alone.seconds + lane


def test_ddp_over_a_slow_link_is_bound_by_it(source, file):
    request = request_of(file, "rtx-4090", gpus=8, strategy="ddp")
    found = timed(source, request, DistributedDataParallel(8), host=catalogue.host("8x-rtx-4090-dual-socket-box"))

    assert found.bound_by == "pcie"


def test_fsdp_gathers_a_block_while_the_one_before_runs(source, file):
    request = request_of(file, gpus=8, strategy="fsdp2")
    found = timed(source, request, FullyShard(8, Fsdp2Settings(blocks=tuple(f"0.{i}" for i in range(BLOCKS)))))

    serial = found.busy_s["compute"] + found.busy_s["nvlink"]
    assert max(found.busy_s["compute"], found.busy_s["nvlink"]) < found.seconds < 0.9 * serial


def test_the_node_that_was_taken_is_named(source, file):
    found = timed(source, request_of(file, gpus=8, strategy="ddp"), DistributedDataParallel(8))

    assert found.assumptions == ("a node as DGX A100 80GB (not given)",)


class Uploading(SingleDevice):
    """Copies every block to the GPU before it runs; says itself what waits for it, or leaves that to the timeline."""

    def __init__(self, *, waits: bool, ahead: bool = False) -> None:
        super().__init__()
        self._waits, self._ahead, self._tickets = waits, ahead, []

    def before_module(self, sim, module, kind):
        if kind is not Pass.FORWARD or sim.trace.modules[module].class_name != "Linear":
            return
        if self._ahead and not self._tickets:
            self._tickets = [sim.enqueue("h2d", 8 * WIDTH * WIDTH, 1) for _ in range(BLOCKS)]
        ticket = self._tickets.pop(0) if self._ahead else sim.enqueue("h2d", 8 * WIDTH * WIDTH, 1)
        if self._waits:
            sim.wait(ticket)


def test_what_a_strategy_enqueues_says_where_and_when(source, file):
    request = request_of(file, iterations=2)
    _, _, work, _ = planned(source, request, Uploading(waits=True))

    uploads = [w for w in work if w.kind == "h2d"]
    assert [w.iteration for w in uploads] == [0] * BLOCKS + [1] * BLOCKS
    assert [w.event for w in uploads[:BLOCKS]] == sorted({w.event for w in uploads})
    assert {work.runs[w.run].iteration for w in uploads[BLOCKS:]} == {1}
    assert [w.after for w in work if w.kind == WAIT][:2] == [(0,), (2,)]


def test_an_upload_is_waited_for_by_the_ops_behind_it_and_prefetched_by_one_place(source, file):
    request = request_of(file)
    found = timed(source, request, Uploading(waits=False))

    assert found.busy_s["h2d"] == pytest.approx(BLOCKS * 8 * WIDTH * WIDTH / request.device.h2d_bytes_per_s, rel=0.05)
    assert found.bound_by == "h2d"
    assert found.seconds < found.busy_s["h2d"] + found.busy_s["compute"]


def test_a_strategy_that_says_what_it_waits_for_may_run_ahead_further(source, file):
    request = request_of(file)
    near = timed(source, request, Uploading(waits=True))
    far = timed(source, request, Uploading(waits=True, ahead=True))

    assert far.seconds <= near.seconds


def test_a_step_that_is_planned_again_takes_the_same_time(source, file):
    request = request_of(file, gpus=8, strategy="fsdp2")
    _, _, _, plan = planned(source, request, FullyShard(8))

    assert plan.seconds() == plan.seconds()


def test_a_card_with_twice_the_rates_is_faster(source, file):
    slow = timed(source, request_of(file, "a100-80gb"), SingleDevice())
    fast = timed(source, request_of(file, "h100"), SingleDevice())

    assert fast.seconds < slow.seconds


def test_fp32_products_run_on_tensor_cores_only_where_the_loop_says_so(source, file):
    request = request_of(file, precision="fp32")
    trace, _, _, plain = planned(source, request, SingleDevice())
    table = OpTable(trace)

    assert (table.kind == MATMUL).any()
    assert StepPlan(request, *planned(source, request, SingleDevice())[:3], tf32=True).seconds() < 0.5 * plain.seconds()


def test_accumulated_steps_are_timed_as_simulated(source, file):
    loop = LoopFacts(grad_accum_steps=3)
    request = request_of(file, gpus=8, strategy="ddp").but(grad_accum_steps=loop.grad_accum_steps)
    found = timed(source, request, DistributedDataParallel(8))

    assert found.tokens_per_s == pytest.approx(3 * 8 * 4 * 1024 / found.seconds)


class Offloading(SingleDevice):
    """Steps on the host: gradients go down, the optimizer runs there, parameters come up."""

    def step(self, sim):
        sim.enqueue("d2h", 10**9)
        sim.enqueue("host_step", 10**9)
        sim.enqueue("h2d", 10**9)


def test_a_step_on_the_host_does_one_thing_after_the_other(source, file):
    request = request_of(file)
    found = timed(source, request, Offloading())

    lanes = ("compute", "d2h", "cpu_optimizer", "h2d")
    assert found.seconds == pytest.approx(sum(found.busy_s[lane] for lane in lanes), rel=0.01)
    assert found.busy_s["cpu_optimizer"] == pytest.approx(10**9 / 4 / 1.8e9)
    assert found.bound_by == "cpu_optimizer"


class Perturbing(SingleDevice):
    """A pass over all parameters before the model runs."""

    def before_module(self, sim, module, kind):
        if kind is Pass.FORWARD and not sim.trace.modules[module].fqn:
            self.ticket = sim.enqueue("arithmetic", 10**9)


def test_arithmetic_of_a_strategy_runs_where_the_ops_run(source, file):
    plain = timed(source, request_of(file), SingleDevice())
    found = timed(source, request_of(file), Perturbing())
    device = request_of(file).device

    more = 10**9 / (device.memory_bandwidth_bytes_per_s * coefficients().memory) + coefficients().gap
    assert found.busy_s["compute"] == pytest.approx(plain.busy_s["compute"] + more)


def test_work_before_the_first_run_of_a_step_is_not_lost(source, file):
    class Between(SingleDevice):
        def zero_grad(self, sim, set_to_none):
            sim.enqueue("broadcast", 8)
            super().zero_grad(sim, set_to_none)

    request = request_of(file, gpus=8, strategy="ddp", zero_grad="before-forward")
    found = timed(source, request, Between())
    alone = timed(source, request_of(file, gpus=8, strategy="ddp"), SingleDevice())

    assert found.busy_s["nvlink"] > 0
    assert found.seconds < 1.1 * alone.seconds  # it did not hold the ops back to the end


def test_a_host_that_waits_for_the_gpu_issues_nothing_meanwhile(source, file):
    class Waiting(Perturbing):
        def before_module(self, sim, module, kind):
            super().before_module(sim, module, kind)
            if kind is Pass.FORWARD and not sim.trace.modules[module].fqn:
                sim.wait(self.ticket, stream=HOST)

    free, waits = (timed(source, request_of(file), strategy()) for strategy in (Perturbing, Waiting))

    assert waits.seconds > free.seconds
    assert waits.busy_s == pytest.approx(free.busy_s)


def test_copies_tensor_by_tensor_cost_the_host_their_launches(source, file):
    class Copying(SingleDevice):
        def __init__(self, ops):
            super().__init__()
            self.ops = ops

        def before_module(self, sim, module, kind):
            if kind is Pass.FORWARD and not sim.trace.modules[module].fqn:
                sim.enqueue("h2d", 1000, 1, (), self.ops)

    one, many = (timed(source, request_of(file), Copying(ops)) for ops in (1, 100))

    assert many.busy_s["host"] - one.busy_s["host"] == pytest.approx(100 * coefficients().host_op)


def test_a_pass_over_many_small_parameters_waits_for_the_host(source, file):
    class Many(SingleDevice):
        def before_module(self, sim, module, kind):
            if kind is Pass.FORWARD and not sim.trace.modules[module].fqn:
                sim.enqueue("arithmetic", 1000, ops=5000)

    found = timed(source, request_of(file), Many())

    assert found.busy_s["host"] > 5000 * coefficients().host_op
    assert found.seconds > 5000 * coefficients().host_op


def test_a_thousand_steps_of_a_real_plan_are_exported(source, file, tmp_path):
    request = request_of(file, gpus=8, strategy="fsdp2")
    _, _, _, plan = planned(source, request, FullyShard(8))
    one = sum(1 for _ in plan.tasks())
    count = write_trace(repeated(plan.tasks, 1000), tmp_path / "lanes.json")

    assert count == 1000 * one + 3  # host, compute and nvlink are named


def test_hybrid_sharding_gathers_over_nvlink_and_averages_over_the_network(source, file):
    class Hybrid(SingleDevice):
        def before_module(self, sim, module, kind):
            if sim.trace.modules[module].class_name == "Linear":
                sim.enqueue("all_gather", 2 * WIDTH * WIDTH, 1, ranks=8)

        def grad_ready(self, sim, param, block):
            super().grad_ready(sim, param, block)
            sim.enqueue("all_reduce", param.nbytes // 8, 2, ranks=2, stride=8)

    found = timed(source, request_of(file, gpus=16, nodes=2, strategy="fsdp2"), Hybrid())

    assert {"nvlink", "network"} <= found.busy_s.keys()


def test_work_of_another_stream_can_wait_too(source, file):
    class Chained(SingleDevice):
        def before_module(self, sim, module, kind):
            if kind is Pass.FORWARD and not sim.trace.modules[module].fqn:
                up = sim.enqueue("h2d", 10**9, 1)
                sim.wait(up, stream=2)
                sim.wait(sim.enqueue("d2h", 10**9, 2))

    found = timed(source, request_of(file), Chained())
    copies = found.busy_s["h2d"] + found.busy_s["d2h"]

    assert found.seconds == pytest.approx(copies + found.busy_s["compute"], rel=0.01)


def test_gpus_that_no_node_holds_are_spread_over_several(source, file):
    found = timed(source, request_of(file, gpus=32, strategy="ddp"), DistributedDataParallel(32))

    assert found.assumptions == ("4 nodes as DGX A100 80GB (not given)",)
    assert "network" in found.busy_s
