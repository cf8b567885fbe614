"""ZO2's peak by a closed form, written from the documented schedule, against the simulation of the trace.

OPT as transformers 5 runs it, with the loss of the zo2 package (cross-entropy in the logits' own dtype on shifted copies).
"""

from __future__ import annotations

import random
import textwrap
from dataclasses import dataclass

import pytest
from memplan.models import load
from memplan.planner.simulate import simulate
from memplan.planner.strategies.zo2 import Zo2
from memplan.planner.trace.block_segments import cut_blocks
from memplan.planner.trace.options import TraceOptions
from memplan.planner.trace.tracer import trace_step

MIB = 2**20
ITEM = {"fp16": 2, "bf16": 2, "fp32": 4}

FACTORY = """
    import torch
    from transformers import OPTConfig, OPTForCausalLM

    def shifted(logits, labels, vocab_size, **kwargs):
        logits = logits[..., :-1, :].contiguous()
        labels = labels[..., 1:].contiguous()
        return torch.nn.functional.cross_entropy(logits.view(-1, vocab_size), labels.view(-1))

    def build(h=64, heads=2, layers=2, vocab=512, positions=64, tied="no", attention="eager"):
        config = OPTConfig(
            hidden_size=h, ffn_dim=4 * h, num_attention_heads=heads, num_hidden_layers=layers, vocab_size=vocab,
            max_position_embeddings=positions, word_embed_proj_dim=h, tie_word_embeddings=tied == "yes", use_cache=False,
        )
        config._attn_implementation = attention
        model = OPTForCausalLM(config)
        model.loss_function = shifted

        def batch(batch, seq):
            ids = torch.ones(batch, seq, dtype=torch.long)
            return {"input_ids": ids, "labels": ids}

        return model, batch
"""


@dataclass(frozen=True)
class Shape:
    h: int
    heads: int
    layers: int
    vocab: int
    b: int
    s: int
    dtype: str
    tied: bool
    attention: str

    @property
    def formula_bytes(self) -> int:
        return max(self.moments.values())

    @property
    def moments(self) -> dict[str, int]:
        """Bytes at each moment that can be the peak of the second and later steps."""
        h, b, s, e = self.h, self.b, self.s, ITEM[self.dtype]
        eager = self.attention == "eager"
        block = (12 * h * h + 13 * h) * e
        table = self.vocab * h * e
        resident = table * (1 if self.tied else 2) + (s + 2) * h * e + 2 * h * e
        x, f = b * s * h * e, b * s * 4 * h * e
        logits, shifted = b * s * self.vocab * e, b * (s - 1) * self.vocab * e
        mask = b * s * s * e if eager else 0
        live = 6 * x + 2 * mask
        probabilities = b * self.heads * s * s
        # the other lane's result beside the layer norm's, q, k and v; scores, their fp32 softmax and its cast.  CUDA's softmax
        # reads fp16 and writes fp32 by itself, but of bf16 scores it makes an fp32 copy first (ATen/native/SoftMax.cpp)
        attention = 5 * x + (10 if self.dtype == "bf16" else 8) * probabilities if eager else 7 * x
        mlp = 2 * f + 2 * x + (e * probabilities if eager else 0)  # the layer keeps the probabilities to its end
        return {
            "embedding update": resident + 4 * table,
            "head update": resident + 2 * x + 4 * table,
            "head's last perturbation": resident + 2 * x + 2 * logits + 3 * table,
            "block update": resident + block + live + 4 * 4 * h * h * e,
            "attention": resident + block + live + attention,
            "mlp": resident + block + live + mlp,
            "upload": resident + 2 * block + live,
            "loss": resident + 2 * x + 2 * logits + (2 * shifted if b > 1 else 0) + shifted,
        }


def drawn(seed: int) -> Shape:
    pick = random.Random(seed)
    head_dim = 64
    heads = pick.randint(2, 32)
    return Shape(
        h=heads * head_dim,
        heads=heads,
        layers=pick.randint(2, 6),
        vocab=pick.choice((1000, 8000, 50272)),
        b=pick.choice((1, 1, 2, 3, 8)),
        s=pick.choice((64, 200, 512, 1024, 2048)),
        dtype=pick.choice(("fp16", "bf16", "fp32")),
        tied=pick.random() < 0.4,
        attention=pick.choice(("eager", "sdpa")),
    )


def simulated_bytes(tmp_path, shape: Shape) -> int:
    file = tmp_path / "opt.py"
    file.write_text(textwrap.dedent(FACTORY))
    overrides = {"h": shape.h, "heads": shape.heads, "layers": shape.layers, "vocab": shape.vocab, "positions": shape.s}
    overrides |= {"tied": "yes" if shape.tied else "no", "attention": shape.attention}
    spec = load(f"{file}:build", overrides={k: str(v) for k, v in overrides.items()})
    options = TraceOptions(
        batch_size=shape.b, seq_len=shape.s, precision=shape.dtype, mode="inference", attention=shape.attention
    )
    trace = trace_step(spec, options, with_graph=False)
    ledger, _ = simulate(trace, Zo2(cut_blocks(trace)))
    ledger.check()
    return ledger.peak_bytes()


@pytest.mark.parametrize("shape", [drawn(seed) for seed in range(16)], ids=str)
def test_the_simulated_peak_is_the_closed_form_to_a_mebibyte(tmp_path, shape):
    assert simulated_bytes(tmp_path, shape) == pytest.approx(shape.formula_bytes, abs=MIB)


def test_the_drawn_shapes_reach_several_kinds_of_peak():
    shapes = [drawn(seed) for seed in range(16)]

    assert len({max(s.moments, key=s.moments.__getitem__) for s in shapes}) >= 4
    assert {s.dtype for s in shapes} == {"fp16", "bf16", "fp32"}
    assert {s.attention for s in shapes} == {"eager", "sdpa"}
    assert {s.tied for s in shapes} == {True, False}
    assert {s.b > 1 for s in shapes} == {True, False}
