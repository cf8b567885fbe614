"""A user's own factory: found, imported in its own surroundings, called, and reported clearly when it fails."""

import subprocess
import sys
import textwrap

import pytest
import torch
from memplan.errors import UserError
from memplan.models import build, load
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

NET = """
    import torch
    def build(width=4, **kwargs):
        module = torch.nn.Linear(width, 1)
        return module, lambda batch, seq: {"input": torch.ones(batch, width)}, lambda m, b: m(**b).mean()
"""


def write(path, code):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(code), encoding="utf-8")
    return path


def made(file, function="build", **kwargs):
    return build(load(f"{file}:{function}", overrides={k: str(v) for k, v in kwargs.items()}), dtype=torch.float32)


def failure(file, function="build", **kwargs):
    with pytest.raises(UserError) as caught:
        made(file, function, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_factory_gives_a_module_a_batch_and_a_step(tmp_path):
    built = made(write(tmp_path / "net.py", NET))
    loss = built.step(built.module, built.make_batch(3, 5))
    loss.backward()
    assert loss.ndim == 0
    assert built.module.weight.grad is not None


def test_keyword_arguments_come_from_set(tmp_path):
    spec = load(f"{write(tmp_path / 'net.py', NET)}:build", overrides={"width": "7", "name": "x", "flag": "true"})
    assert dict(spec.factory.kwargs) == {"width": 7, "name": "x", "flag": True}
    assert build(spec, dtype=torch.float32).module.in_features == 7


def test_loading_a_factory_runs_none_of_its_code(tmp_path):
    file = write(tmp_path / "net.py", "raise SystemExit('ran')")
    spec = load(f"{file}:build")
    assert (spec.source, spec.task, spec.config) == ("factory", "custom", None)


def test_a_factory_is_built_without_memory_under_a_fake_mode(tmp_path):
    file = write(tmp_path / "net.py", NET)
    with FakeTensorMode():
        built = made(file, width=10**6)
        assert isinstance(built.module.weight, FakeTensor)
        assert isinstance(built.make_batch(2, 2)["input"], FakeTensor)


def test_what_a_file_makes_on_import_is_real_even_when_it_is_first_imported_for_a_trace(tmp_path):
    file = write(
        tmp_path / "net.py",
        NET + "\n    TABLE = torch.ones(2)\n    def table(): return torch.nn.Identity(), lambda b, s: {'x': TABLE}",
    )
    with FakeTensorMode():
        made(file)
    assert not isinstance(made(file, "table").make_batch(1, 1)["x"], FakeTensor)


def test_a_file_that_imports_its_neighbours_works(tmp_path):
    write(tmp_path / "neighbour_of_net.py", "WIDTH = 3")
    file = write(tmp_path / "net.py", NET.replace("import torch", "import torch\n    from neighbour_of_net import WIDTH", 1))
    made(file)


def test_a_package_with_relative_imports_works(tmp_path):
    write(tmp_path / "proj" / "__init__.py", "")
    write(tmp_path / "proj" / "parts" / "__init__.py", "")
    write(tmp_path / "proj" / "parts" / "size.py", "WIDTH = 6")
    code = "import torch\nfrom ..proj_size import WIDTH\ndef build():\n    return torch.nn.Linear(WIDTH, 1), dict"
    write(tmp_path / "proj" / "proj_size.py", "from .parts.size import WIDTH")
    file = write(tmp_path / "proj" / "parts" / "net.py", code)
    assert made(file).module.in_features == 6


def test_a_module_of_a_package_is_found_in_the_working_folder(tmp_path, monkeypatch):
    write(tmp_path / "pack_in_cwd" / "__init__.py", "")
    write(tmp_path / "pack_in_cwd" / "sizes.py", "WIDTH = 5")
    write(
        tmp_path / "pack_in_cwd" / "net.py",
        "import torch\nfrom .sizes import WIDTH\ndef build():\n    return torch.nn.Linear(WIDTH, 1), dict",
    )
    monkeypatch.chdir(tmp_path)
    assert made("pack_in_cwd.net").module.in_features == 5


@pytest.mark.parametrize("folder", ["models", "planner", "hardware", "validator"])
def test_a_users_folder_with_a_name_of_ours_does_not_collide(tmp_path, folder):
    """In a process of its own, with memplan loaded first, the way the command line runs."""
    write(tmp_path / folder / "__init__.py", "")
    write(
        tmp_path / folder / "net.py", "import torch\nfrom . import size\ndef make():\n    return torch.nn.Linear(size.WIDTH, 1)"
    )
    write(tmp_path / folder / "size.py", "WIDTH = 9")
    write(tmp_path / "train.py", f"from {folder}.net import make\ndef build():\n    return make(), dict")
    code = (
        "import torch, sys, memplan.models as ours, memplan.planner\n"
        "built = ours.build(ours.load('train.py:build'), dtype=torch.float32)\n"
        "assert built.module.in_features == 9\n"
        "assert ours is sys.modules['memplan.models'] and ours.load('gpt2').task == 'causal-lm'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_two_projects_with_a_folder_of_the_same_name_stay_apart(tmp_path):
    for project, width in (("one", 11), ("two", 12)):
        write(tmp_path / project / "models" / "__init__.py", "")
        write(tmp_path / project / "models" / "net.py", f"WIDTH = {width}")
        code = "import torch\nfrom models.net import WIDTH\ndef build():\n    return torch.nn.Linear(WIDTH, 1), dict"
        write(tmp_path / project / "train.py", code)
    widths = [made(tmp_path / project / "train.py").module.in_features for project in ("one", "two")]
    assert widths == [11, 12]


def test_a_file_named_like_a_standard_module_does_not_replace_it(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))  # processes started later would inherit the folder
    import random

    made(write(tmp_path / "random.py", NET))
    assert sys.modules["random"] is random


def test_a_second_build_does_not_run_the_file_again(tmp_path):
    log = tmp_path / "log"
    file = write(tmp_path / "net.py", NET + f"\n    open({str(log)!r}, 'a').write('x')")
    made(file), made(file)
    assert log.read_text() == "x"


def test_a_changed_neighbour_is_seen_by_the_next_build(tmp_path):
    write(tmp_path / "width_of_net.py", "WIDTH = 3")
    file = write(
        tmp_path / "net.py",
        "import torch\nfrom width_of_net import WIDTH\ndef build():\n    return torch.nn.Linear(WIDTH, 1), dict",
    )
    assert made(file).module.in_features == 3
    write(tmp_path / "width_of_net.py", "WIDTH = 40")
    assert made(file).module.in_features == 40


def test_the_fingerprint_covers_the_file_what_it_imports_and_the_arguments(tmp_path):
    write(tmp_path / "a.py", "import b\nW = 1")
    write(tmp_path / "b.py", "W = 2")
    write(tmp_path / "unused.py", "W = 3")
    file = write(tmp_path / "net.py", "def build(**kwargs):\n    from a import W")
    first = load(f"{file}:build").fingerprint
    assert load(f"{file}:build").fingerprint == first
    assert load(f"{file}:build", overrides={"x": "1"}).fingerprint != first
    write(tmp_path / "unused.py", "W = 4")
    assert load(f"{file}:build").fingerprint == first
    write(tmp_path / "b.py", "W = 5")
    assert load(f"{file}:build").fingerprint != first


def test_a_module_alone_needs_a_batch_fn_and_the_message_shows_one(tmp_path):
    message = failure(write(tmp_path / "net.py", "import torch\ndef build():\n    return torch.nn.Linear(1, 1)"))
    assert "returned a Linear without a batch_fn. Return (module, batch_fn)" in message
    assert "def batch_fn(batch, seq):" in message


def test_a_transformers_model_alone_needs_no_batch_fn(tmp_path):
    code = """
        from transformers import GPT2Config, GPT2LMHeadModel
        def build():
            return GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=50, bos_token_id=0, eos_token_id=0))
    """
    built = made(write(tmp_path / "net.py", code))
    assert built.step(built.module, built.make_batch(2, 4)).ndim == 0


@pytest.mark.parametrize(
    ("returned", "got"),
    [("None", "NoneType"), ("(1, 2)", "(int, int)"), ("(torch.nn.Linear(1, 1), dict, dict, 4)", "(Linear, type, type, int)")],
)
def test_a_factory_that_returns_something_else_is_told_what_to_return(tmp_path, returned, got):
    file = write(tmp_path / "net.py", f"import torch\ndef build():\n    return {returned}")
    assert f"returned {got}. Return a torch.nn.Module, (module, batch_fn)" in failure(file)


def test_a_factory_that_raises_is_reported_with_the_users_line(tmp_path):
    file = write(
        tmp_path / "net.py", "def helper():\n    raise RuntimeError('no weights\\nsecond line')\n\ndef build():\n    helper()"
    )
    assert f"net.py:build raised RuntimeError: no weights (at {file}:2)" in failure(file)


def test_an_error_inside_torch_names_the_users_line_that_led_there(tmp_path):
    file = write(tmp_path / "net.py", "import torch\ndef build():\n    return torch.nn.Linear('a', 1)")
    assert f"(at {file}:3)" in failure(file)


def test_a_syntax_error_is_reported_with_its_line(tmp_path):
    file = write(tmp_path / "net.py", "x = 1\ndef build(:\n    pass")
    assert f"SyntaxError: invalid syntax (net.py, line 2) (at {file}:2)" in failure(file)


def test_a_missing_import_says_what_to_install(tmp_path):
    assert "Install surely_not_there" in failure(write(tmp_path / "net.py", "import surely_not_there\ndef build(): pass"))


def test_an_exit_in_the_users_code_does_not_end_memplan(tmp_path):
    assert "raised SystemExit" in failure(write(tmp_path / "net.py", "import sys\ndef build():\n    sys.exit(3)"))


def test_a_wrong_keyword_argument_says_which_were_given(tmp_path):
    file = write(tmp_path / "net.py", "def build(width):\n    pass")
    assert "(given: depth)" in failure(file, depth=3)


def test_an_unknown_function_offers_the_nearest(tmp_path):
    assert "has no function 'biuld'. Did you mean build?" in failure(write(tmp_path / "net.py", NET), "biuld")


def test_a_missing_file_and_a_missing_module_are_named():
    with pytest.raises(UserError, match=r"no file nowhere\.py"):
        load("nowhere.py:build")
    with pytest.raises(UserError, match=r"no module nowhere\.at\.all in this folder or on sys\.path"):
        load("nowhere.at.all:build")


def test_a_task_cannot_be_put_on_a_factory(tmp_path):
    with pytest.raises(UserError, match="decides itself what it trains"):
        load(f"{write(tmp_path / 'net.py', NET)}:build", task="causal-lm")


def test_a_step_without_a_scalar_loss_is_refused(tmp_path):
    file = write(
        tmp_path / "net.py",
        "import torch\ndef build():\n    return torch.nn.Linear(2, 2), lambda b, s: {'input': torch.ones(b, 2)}",
    )
    built = made(file)
    with pytest.raises(UserError, match=r"returned a tensor of shape \(3, 2\), expected a scalar loss"):
        built.step(built.module, built.make_batch(3, 1))


def test_a_batch_that_is_no_dict_is_refused(tmp_path):
    built = made(
        write(
            tmp_path / "net.py", "import torch\ndef build():\n    return torch.nn.Linear(2, 2), lambda b, s: torch.ones(b, 2)"
        )
    )
    with pytest.raises(UserError, match="batch_fn returned a Tensor, expected a dict"):
        built.make_batch(3, 1)


def test_a_forward_that_fails_names_the_users_line(tmp_path):
    code = """\
        import torch
        class Net(torch.nn.Module):
            def forward(self, x):
                return x @ torch.ones(3, 3)
        def build():
            return Net(), lambda b, s: {"x": torch.ones(b, 2)}
    """
    file = write(tmp_path / "net.py", code)
    built = made(file)
    with pytest.raises(UserError, match="the forward pass raised RuntimeError: mat1 and mat2") as caught:
        built.step(built.module, built.make_batch(3, 1))
    assert f"(at {file}:4)" in str(caught.value)


def test_running_out_of_gpu_memory_is_not_called_the_users_mistake(tmp_path):
    code = """\
        import torch
        def step(module, batch):
            raise torch.OutOfMemoryError("CUDA out of memory")
        def build():
            return torch.nn.Linear(1, 1), lambda b, s: {}, step
    """
    built = made(write(tmp_path / "net.py", code))
    with pytest.raises(torch.OutOfMemoryError):
        built.step(built.module, {})


def test_an_fp32_module_is_cast_and_so_are_its_inputs(tmp_path):
    built = build(load(f"{write(tmp_path / 'net.py', NET)}:build"), dtype=torch.bfloat16)
    assert built.module.weight.dtype == torch.bfloat16
    assert built.make_batch(1, 1)["input"].dtype == torch.bfloat16


def test_a_module_that_mixes_dtypes_is_kept_and_noted(tmp_path):
    code = """
        import torch
        def build():
            return torch.nn.Sequential(torch.nn.Linear(2, 2).bfloat16(), torch.nn.LayerNorm(2)), dict
    """
    built = build(load(f"{write(tmp_path / 'net.py', code)}:build"), dtype=torch.bfloat16)
    assert {p.dtype for p in built.module.parameters()} == {torch.bfloat16, torch.float32}
    assert "kept, not cast to bfloat16" in built.notes[0]


def test_what_a_factory_prints_stays_out_of_the_answer(tmp_path, capsys):
    made(write(tmp_path / "net.py", NET + "\n    print('hello')"))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "hello" in captured.err
