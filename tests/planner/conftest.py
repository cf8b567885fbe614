"""What the tests of imported training files share."""

from __future__ import annotations

import pytest
from memplan.planner.engines.detect import read_config
from memplan.planner.engines.imported import apply

_LLAMA = {"model_type": "llama", "hidden_size": 2048}
_DEEPSPEED = """{"zero_optimization": {"stage": 3, "overlap_comm": true, "reduce_bucket_size": "auto"},
 "bf16": {"enabled": "auto"}, "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
 "gradient_clipping": "auto"}"""


class TrainingFile:
    """A training file in a folder, beside a ds.json that it can name."""

    def __init__(self, folder):
        self.folder = folder
        (folder / "ds.json").write_text(_DEEPSPEED)

    def imported(self, text, within="."):
        """The file as it was understood; `within`: its folder, below the one with ds.json."""
        path = self.folder / within / "config.yml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return read_config(path)

    def asked(self, text, within=".", **options):
        """The options of `make_request` that the file makes with `options`."""
        return apply(self.imported(text, within), options, _LLAMA)

    @staticmethod
    def otherwise(made, expected):
        """The options among `expected` that came out otherwise; `adapter` is compared field by field."""
        wrong = {}
        for name, value in expected.items():
            got = made.get(name)
            if name == "adapter" and value is not None:
                got = {field: getattr(got, field) for field in value}
            if got != value:
                wrong[name] = got
        return wrong

    @staticmethod
    def not_understood(made):
        return [note for note in made["notes"] if "NOT UNDERSTOOD" in note]


@pytest.fixture
def training_file(tmp_path):
    return TrainingFile(tmp_path)
