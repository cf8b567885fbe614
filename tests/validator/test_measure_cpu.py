"""From the profiler's events to peaks: pairing, marks, and what is kept apart."""

from pathlib import Path

import pytest
from memplan.planner.trace.source import TraceSource
from memplan.validator import cpu
from memplan.validator.api import request_for
from memplan.validator.cpu import MarkEvent, MemoryEvent, Profile, Span

USER = Path(__file__).with_name("user_models.py")


class Event:
    """What torch's profiler hands out, as far as it is read."""

    def __init__(self, name, start, duration=0, nbytes=0, device="DeviceType.CPU"):
        self._fields = name, start, duration, nbytes, device

    def name(self):
        return self._fields[0]

    def start_ns(self):
        return self._fields[1]

    def duration_ns(self):
        return self._fields[2]

    def nbytes(self):
        return self._fields[3]

    def device_type(self):
        return self._fields[4]


def profile(events, marks, spans=()):
    return Profile(
        tuple(MemoryEvent(t, n) for t, n in events),
        tuple(MarkEvent(t, phase, iteration) for t, phase, iteration in marks),
        tuple(Span(a, b, name) for a, b, name in spans),
    )


STEP = ((0, "build", 0), (10, "init", 0), (20, "forward", 0), (30, "backward", 0), (40, "step", 0), (50, "end", 0))


def test_events_marks_and_spans_are_told_apart_and_put_in_order():
    raw = [
        Event("[memory]", 7, nbytes=-4),
        Event("aten::mm", 3, duration=5),
        Event("[memory]", 5, nbytes=4),
        Event("[memory]", 6, nbytes=99, device="DeviceType.CUDA"),
        Event("memplan mark: forward 1", 1),
        Event("Optimizer.step#SGD.step", 2),
    ]
    parsed = cpu.parse(raw)
    assert parsed.events == (MemoryEvent(5, 4), MemoryEvent(7, -4))
    assert parsed.marks == (MarkEvent(1, "forward", 1),)
    assert parsed.spans == (Span(3, 8, "aten::mm"),)


def test_a_phase_peaks_at_its_highest_moment_and_starts_where_the_last_one_ended():
    events = [(1, 100), (21, 50), (22, 30), (23, -30), (31, 10), (32, -60)]
    found = cpu.usage(profile(events, STEP), {}, {})
    peaks = {p.phase: (p.peak_bytes, p.after_bytes) for p in found.phases}
    assert peaks == {"init": (100, 100), "forward": (180, 150), "backward": (160, 100), "step": (100, 100)}
    assert found.peak_bytes == 180


def test_later_iterations_are_one_kind_of_step_and_the_worst_of_them_counts():
    marks = [(0, "forward", 0), (10, "forward", 1), (20, "forward", 2), (30, "end", 2)]
    found = cpu.usage(profile([(1, 5), (11, 7), (12, -7), (21, 9), (22, -9)], marks), {}, {})
    assert found.phase("forward", "first").peak_bytes == 5
    assert found.phase("forward", "later").peak_bytes == 14


def test_what_the_loader_makes_on_the_host_does_not_count():
    marks = [(0, "build", 0), (10, "host", 0), (20, "init", 0), (30, "forward", 0), (40, "end", 0)]
    found = cpu.usage(profile([(1, 80), (11, 1000), (31, 2)], marks), {}, {})
    assert found.peak_bytes == 82


def test_a_number_of_python_code_does_not_count_even_where_autograd_keeps_it():
    import torch

    def kept(make):
        with torch.profiler.profile(profile_memory=True) as profiler:
            with torch.profiler.record_function("memplan mark: forward 0"):
                pass
            x = torch.ones(100, requires_grad=True)
            y = x * make()
            with torch.profiler.record_function("memplan mark: end 0"):
                pass
        assert y.requires_grad
        results = profiler.profiler.kineto_results
        recorded = cpu._with_addresses(cpu.parse(results.events()), results.experimental_event_tree())
        assert all(event.address for event in recorded.events)
        return cpu.usage(recorded, {}, {}).phase("forward", "first").after_bytes

    assert kept(lambda: 0.5) == 800
    assert kept(lambda: torch.tensor(0.5)) == 800 + 4  # a tensor counts


def test_a_small_tensor_that_an_op_makes_is_no_number():
    found = cpu.usage(profile([(21, 8), (22, 8), (26, -8)], STEP, [(20, 21, "aten::rand")]), {}, {})
    assert found.phase("forward", "first").after_bytes == 8


def test_tensors_that_a_module_holds_as_plain_attributes_lie_on_the_host():
    found = cpu.usage(profile([(1, 100), (21, 50)], STEP), {}, {}, constant_bytes=60)
    assert found.phase("init", "first").after_bytes == 40
    assert found.peak_bytes == 90


def test_plain_tensors_are_told_from_parameters_and_buffers():
    import torch
    from memplan.validator.tensors import plain_tensor_bytes

    module = torch.nn.BatchNorm1d(4)
    assert plain_tensor_bytes(module) == 0
    module.table = torch.zeros(10)
    module.same = [module.table[:2], module.weight]
    assert plain_tensor_bytes(module) == 40


def test_a_block_that_a_leaf_op_makes_and_drops_is_scratch_with_the_name_of_the_op():
    events = [(21, 64), (22, 500), (23, -500)]
    marks = STEP
    found = cpu.usage(profile(events, marks, [(20, 25, "aten::mm")]), {}, {"aten::mm": [[64]]})
    assert found.peak_bytes == 64
    assert found.detail["peak_with_kernel_scratch_bytes"]["forward first"] == 564
    assert "564 bytes in aten::mm" in found.notes[0]


def test_a_block_that_is_dropped_outside_of_the_op_is_no_scratch():
    found = cpu.usage(profile([(21, 64), (26, -64)], STEP, [(20, 25, "aten::mm")]), {}, {"aten::mm": [[64]]})
    assert found.peak_bytes == 64


def test_the_result_of_an_op_that_was_stopped_early_is_no_scratch():
    """The end of a recomputation raises inside the last op: its output dies there, what it saved lives."""
    events = [(21, 4096), (22, 8), (23, -4096)]
    outputs = {"aten::native_layer_norm": [[8, 4096]]}
    found = cpu.usage(profile(events, STEP, [(20, 25, "aten::native_layer_norm")]), {}, outputs)
    assert found.peak_bytes == 4104


def test_an_op_that_returned_has_scratch_even_of_the_size_of_another_calls_result():
    events = [(21, 200), (22, 50), (23, -200)]
    found = cpu.usage(profile(events, STEP, [(20, 25, "aten::mm")]), {}, {"aten::mm": [[50], [200]]})
    assert found.peak_bytes == 50


def test_an_op_that_the_trace_does_not_know_hides_nothing():
    found = cpu.usage(profile([(21, 500), (22, -500)], STEP, [(20, 25, "aten::linear")]), {}, {"aten::mm": [[64]]})
    assert found.peak_bytes == 500


def test_saved_random_states_lie_on_the_host():
    import torch

    with torch.profiler.profile(profile_memory=True) as profiler, cpu._random_state_on_host():
        state = torch.get_rng_state()
        torch.set_rng_state(state)
    parsed = cpu.parse(profiler.profiler.kineto_results.events())
    inside = cpu._inside(parsed, [s for s in parsed.spans if s.name == "memplan host"])
    kept = sum(e.delta_bytes for i, e in enumerate(parsed.events) if i not in inside)
    assert state.numel() == 5056
    assert sum(parsed.events[i].delta_bytes for i in inside) == 0
    assert kept == 0


def test_every_byte_that_a_model_keeps_is_counted_also_where_no_parameter_holds_it(tmp_path):
    file = tmp_path / "holder.py"
    file.write_text(
        "import torch\n"
        "class Holder(torch.nn.Linear):\n"
        "    def __init__(self):\n"
        "        super().__init__(4, 1, bias=False)\n"
        "        self.table = [torch.zeros(1000)]\n"
        "def build():\n"
        "    return Holder(), lambda b, s: {'input': torch.ones(b, 4)}, lambda m, batch: m(**batch).sum()\n"
    )
    recorded = cpu.record(request_for(f"{file}:build", "cpu", micro_batch_size=1, seq_len=1))
    found = cpu.usage(recorded.profile, recorded.components, {})
    assert found.phase("init", "first").after_bytes == 4000 + 16
    assert found.components["init"] == {"param": 16, "buffer": 0, "grad": 0, "optimizer_state": 0}


def test_the_components_are_those_of_the_storages_at_each_moment():
    recorded = cpu.record(request_for(f"{USER}:shared", "cpu", micro_batch_size=2, seq_len=8))
    params = (301 * 64 + 2 * (64 * 64 + 64)) * 4  # the tied head and the layer used twice count once
    trained = params - (64 * 64 + 64) * 4
    assert recorded.components["init"] == {"param": params, "buffer": 256, "grad": 0, "optimizer_state": 0}
    assert recorded.components["backward"]["grad"] == trained
    assert recorded.components["step"] == {
        "param": params, "buffer": 256, "grad": 0, "optimizer_state": 2 * trained + 3 * 4,
    }  # fmt: skip


def test_the_leaf_ops_are_named_as_the_profiler_names_them():
    request = request_for(f"{USER}:shared", "cpu", micro_batch_size=2, seq_len=8)
    outputs = cpu.leaf_outputs(TraceSource(exact=True).step(request, target="cpu"))
    assert outputs["aten::embedding"] == [[2 * 8 * 64 * 4]]
    assert outputs["aten::addmm"] == [[2 * 8 * 64 * 4]]


@pytest.mark.parametrize("threads", [1, 2])
def test_the_number_of_threads_is_as_asked_and_put_back(threads, monkeypatch):
    import torch

    seen = []
    monkeypatch.setattr(
        cpu, "record", lambda request: seen.append(torch.get_num_threads()) or cpu.Recorded(profile([], []), {})
    )
    before = torch.get_num_threads()
    cpu.measure(None, {}, threads=threads)
    assert seen == [threads]
    assert torch.get_num_threads() == before
