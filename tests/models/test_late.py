"""Delayed packages stay away from a trace, and are whole for whoever uses them afterwards."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
from memplan.models import late

DELAYED = """
    import sys, torch
    from memplan.models.late import delay
    delay()
    def loaded():
        return "torch._dynamo.convert_frame" in sys.modules
"""


def run(code: str) -> str:
    """What a fresh Python prints that runs `code`."""
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_trace_loads_neither_the_compiler_nor_scipy(tmp_path):
    code = """
        import os, sys
        import memplan
        answer = memplan.fits("openai-community/gpt2", "rtx-4090", seq_len=64, overrides={"n_layer": "2"}, advice=False)
        print(answer.verdict, [m for m in ("torch._dynamo.convert_frame", "scipy.linalg") if m in sys.modules])
    """
    assert run(f"import os\nos.environ['MEMPLAN_CACHE'] = {str(tmp_path)!r}\n" + textwrap.dedent(code)) == "fits []"


def test_who_compiles_afterwards_finds_the_compiler_whole():
    code = """
        from torch._subclasses.fake_tensor import FakeTensorMode
        FakeTensorMode()
        before, config = sys.modules["torch._dynamo"], sys.modules["torch._dynamo.config"]
        unseen = torch._dynamo.disable(lambda x: x + 1)
        assert unseen(1) == 2
        allowed = torch._dynamo.allow_in_graph(lambda x: x)
        constant = torch._dynamo.assume_constant_result(lambda: 1)
        torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]).zero_grad()
        assert not loaded()
        graphs = []
        def backend(graph, inputs):
            graphs.append(graph)
            return graph.forward
        @torch.compile(backend=backend)
        def f(x):
            return unseen(x * 2) * 3
        assert f(torch.ones(2)).tolist() == [9, 9] and len(graphs) == 2, graphs
        assert loaded() and torch._dynamo is before and torch._dynamo.config is config
        assert type(before) is type(sys) and constant._dynamo_marked_constant
        assert id(allowed) in torch._dynamo.trace_rules._allowed_callable_ids
        print("whole")
    """
    assert run(textwrap.dedent(DELAYED) + textwrap.dedent(code)) == "whole"


@pytest.mark.parametrize("name", ["source", "guards", "variables.builder"])
def test_a_module_of_the_compiler_that_is_imported_first_finds_its_package_loaded(name):
    code = f"""
        import importlib
        module = importlib.import_module("torch._dynamo.{name}")
        assert loaded() and module is sys.modules["torch._dynamo.{name}"]
        assert module.__spec__.loader.__class__.__name__ == "SourceFileLoader", module.__spec__
        print(torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)).item())
    """
    assert run(textwrap.dedent(DELAYED) + textwrap.dedent(code)) == "2.0"


def test_the_assignment_of_detection_losses_is_scipys():
    code = """
        import sys
        from memplan.models.late import delay
        delay()
        from scipy.optimize import linear_sum_assignment
        assert "scipy.optimize._optimize" not in sys.modules
        print([a.tolist() for a in linear_sum_assignment([[4, 1], [2, 8]])])
        from scipy.optimize import minimize
        assert callable(minimize) and linear_sum_assignment([[1]])[0] == [0]
    """
    assert run(code) == "[[0, 1], [1, 0]]"


def test_transformers_lists_the_same_models_when_it_reads_them_once():
    code = """
        import sys
        from memplan.models.late import import_transformers
        import_transformers()
        from transformers.utils import import_utils
        kept = {k: v for k, v in vars(sys.modules["transformers.models"]).items() if isinstance(v, dict)}
        import_utils.define_import_structure.cache_clear()
        import_utils.create_import_structure_from_path.cache_clear()
        import importlib
        importlib.reload(sys.modules["transformers.models"])
        again = {k: v for k, v in vars(sys.modules["transformers.models"]).items() if isinstance(v, dict)}
        for name in ("_class_to_module", "_object_missing_backend"):
            assert kept[name] == again[name] and len(again["_class_to_module"]) > 1000, name
        print("equal")
    """
    assert run(code) == "equal"


class Plain(late._Package):
    def provisional(self):
        return {"ready": "before"}


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A delayed package `late_outer.inner`; `init` is its source."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(late, "_delayed", {})
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    folder = tmp_path / "late_outer" / "inner"
    folder.mkdir(parents=True)
    (tmp_path / "late_outer" / "__init__.py").write_text("")
    (folder / "apart.py").write_text("value = 1")
    (folder / "part.py").write_text("from . import ready")

    def make(init: str):
        (folder / "__init__.py").write_text(init)
        late._put("late_outer.inner", {"apart"}, Plain)
        return sys.modules["late_outer.inner"]

    yield make
    for name in [n for n in sys.modules if n.split(".")[0] == "late_outer"]:
        del sys.modules[name]


def test_a_package_gives_what_is_written_down_until_more_is_wanted(package):
    module = package("ready = 'after'\nmore = 7")
    assert module.ready == "before"
    assert not hasattr(module, "__wrapped__")
    assert module.ready == "before"
    assert module.more == 7
    assert module.ready == "after"


def test_a_module_that_stands_alone_leaves_its_package_delayed(package):
    import importlib

    module = package("raise AssertionError('loaded')")
    assert importlib.import_module("late_outer.inner.apart").value == 1
    assert module.apart.value == 1


def test_a_module_that_its_package_imports_is_one_module(package):
    import importlib

    module = package("ready = 'after'\nfrom . import part")
    part = importlib.import_module("late_outer.inner.part")
    assert part is module.part
    assert part.ready == "after"
    assert part.__spec__.origin.endswith("part.py")


def test_a_package_that_fails_to_load_can_be_imported_again(package):
    module = package("raise RuntimeError('broken')")
    with pytest.raises(RuntimeError, match="broken"):
        _ = module.more
    assert "late_outer.inner" not in sys.modules


def test_a_package_that_is_loaded_is_left_as_it_is(package):
    module = package("more = 7")
    assert module.more == 7
    late._put("late_outer.inner", set(), Plain)
    assert sys.modules["late_outer.inner"] is module
    assert late._delayed == {}


def test_a_package_that_is_not_installed_is_not_delayed(package):
    late._put("late_nowhere.inner", set(), Plain)
    assert late._delayed == {}


def test_the_first_recording_of_a_process_is_the_one_that_every_later_one_is():
    """A step that makes a constant (an empty key-value cache) loads the compiler in its midst, which keeps open frames."""
    code = """
from memplan.planner.trace.source import TraceSource
from memplan.validator.api import request_for
from memplan.validator.zoo import find
request = request_for(find("opt").spec(), "cpu", method="mezo", micro_batch_size=2, seq_len=32)
print(*(len(TraceSource(exact=True).step(request, target="cpu").event_kind) for _ in range(2)))
"""
    first, later = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()

    assert int(first) == int(later) > 100
