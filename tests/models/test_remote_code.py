"""A model that brings its own Python code, built when that is allowed: in a process of its own, its cache under HF_HOME."""

import json
import os
import subprocess
import sys

import pytest

CONFIG = """
from transformers import PretrainedConfig
class HomeConfig(PretrainedConfig):
    model_type = "homemade"
    def __init__(self, vocab_size=50, width=8, **kwargs):
        self.vocab_size, self.width = vocab_size, width
        super().__init__(**kwargs)
"""
MODEL = """
import torch
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput
from .configuration_home import HomeConfig
class HomeForCausalLM(PreTrainedModel):
    config_class = HomeConfig
    def __init__(self, config):
        super().__init__(config)
        self.embed = torch.nn.Embedding(config.vocab_size, config.width)
        self.head = torch.nn.Linear(config.width, config.vocab_size)
        self.post_init()
    def forward(self, input_ids, labels=None):
        logits = self.head(self.embed(input_ids))
        return CausalLMOutput(loss=torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits=logits)
"""


@pytest.fixture
def folder(tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    (home / "configuration_home.py").write_text(CONFIG)
    (home / "modeling_home.py").write_text(MODEL)
    auto_map = {"AutoConfig": "configuration_home.HomeConfig", "AutoModelForCausalLM": "modeling_home.HomeForCausalLM"}
    config = {"model_type": "homemade", "architectures": ["HomeForCausalLM"], "vocab_size": 60, "auto_map": auto_map}
    (home / "config.json").write_text(json.dumps(config))
    return home


def test_the_models_own_code_is_built_and_takes_overrides(folder, tmp_path):
    code = (
        "import torch\nfrom memplan.models import build, load\n"
        f"spec = load({str(folder)!r}, trust_remote_code=True, overrides={{'vocab_size': '70'}})\n"
        "built = build(spec, dtype=torch.float32)\n"
        "built.step(built.module, built.make_batch(2, 4)).backward()\n"
        "print(type(built.module).__name__, sum(p.numel() for p in built.module.parameters()))"
    )
    environment = {**os.environ, "HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["HomeForCausalLM", str(70 * 8 + 8 * 70 + 70)]


def test_the_fingerprint_covers_the_models_own_code(folder):
    from memplan.models import load

    before = load(str(folder), trust_remote_code=True).fingerprint
    (folder / "modeling_home.py").write_text(MODEL + "# changed")
    assert load(str(folder), trust_remote_code=True).fingerprint != before
