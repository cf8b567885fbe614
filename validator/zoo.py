"""The zoo: one architecture of every kind that transformers has, small enough to train a real step on a CPU in seconds.

Each is its family's default config made narrow; see `tiny`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import UserError, did_you_mean
from .tiny import tiny_config

if TYPE_CHECKING:
    from ..models import ModelSpec
    from .compare import Comparison

BATCH_SIZE = 2
SEQ_LEN = 64
_WAVE = 8000  # samples of sound: half a second


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One model of the zoo: a model type of transformers, what it is trained for, and how long its sequences are."""

    name: str
    kind: str
    """causal, masked, seq2seq, vision, audio or multimodal."""
    task: str
    seq_len: int = SEQ_LEN

    def values(self, **overrides: Any) -> dict[str, Any]:
        """Its config's content."""
        return {**tiny_config(self.name, "narrow"), **overrides}

    def spec(self, **overrides: Any) -> ModelSpec:
        """The model, as the rest of the project takes it; `overrides` are fields of the config."""
        from ..models import ModelSpec

        return ModelSpec(name=self.name, source="folder", task=self.task, config=self.values(**overrides))


def _all(kind: str, task: str, *names: str, seq_len: int = SEQ_LEN) -> list[Architecture]:
    return [Architecture(name=n, kind=kind, task=task, seq_len=seq_len) for n in names]


ZOO: tuple[Architecture, ...] = (
    *_all(
        "causal", "causal-lm",
        "llama", "mistral", "mixtral", "gemma", "gemma2", "gemma3_text", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe",
        "qwen3_next", "gpt2", "gpt_neo", "gpt_neox", "gptj", "gpt_bigcode", "gpt_oss", "opt", "bloom", "falcon", "mpt", "phi",
        "phi3", "stablelm", "olmo", "olmo2", "olmoe", "granite", "granitemoe", "cohere", "cohere2", "starcoder2", "smollm3",
        "deepseek_v2", "deepseek_v3", "glm4", "nemotron", "codegen", "xglm", "biogpt", "persimmon", "helium", "exaone4",
        "lfm2", "bitnet", "ctrl", "openai-gpt", "xlnet", "mamba", "mamba2", "falcon_h1", "bamba", "jamba", "zamba2",
        "recurrent_gemma", "rwkv", "minimax", "nanochat", "ernie4_5", "arcee", "modernbert-decoder", "seed_oss",
    ),
    *_all(
        "masked", "masked-lm",
        "bert", "roberta", "xlm-roberta", "distilbert", "albert", "electra", "deberta", "deberta-v2", "mpnet", "modernbert",
        "convbert", "funnel", "fnet", "layoutlm", "big_bird", "nystromformer", "roformer", "mobilebert", "squeezebert",
        "megatron-bert", "rembert", "esm", "camembert", "yoso",
    ),
    *_all(
        "seq2seq", "seq2seq-lm",
        "t5", "mt5", "umt5", "longt5", "bart", "mbart", "pegasus", "pegasus_x", "marian", "m2m_100", "blenderbot",
        "blenderbot-small", "led", "prophetnet", "fsmt", "plbart", "bigbird_pegasus", "nllb-moe",
    ),
    *_all(
        "vision", "image-classification",
        "vit", "deit", "beit", "swin", "swinv2", "dinov2", "dinov2_with_registers", "vit_msn", "ijepa", "resnet", "convnext",
        "convnextv2", "regnet", "efficientnet", "mobilenet_v1", "mobilenet_v2", "mobilevit", "mobilevitv2", "levit", "pvt",
        "pvt_v2", "segformer", "focalnet", "hiera", "poolformer", "cvt", "swiftformer", "bit", "data2vec-vision",
    ),
    *_all("vision", "auto", "vit_mae", "videomae", "yolos", "timesformer"),
    *_all(
        "audio", "ctc",
        "wav2vec2", "hubert", "wavlm", "sew", "sew-d", "unispeech", "unispeech-sat",
        seq_len=_WAVE,
    ),
    *_all("audio", "ctc", "wav2vec2-bert"),
    *_all("audio", "speech-seq2seq", "whisper", "speech_to_text", "moonshine"),
    *_all("audio", "auto", "audio-spectrogram-transformer"),
    *_all(
        "multimodal", "auto",
        "clip", "siglip", "blip", "chinese_clip", "altclip", "flava",
    ),
    *_all(
        "multimodal", "image-text-to-text",
        "llava", "paligemma", "qwen2_vl", "qwen2_5_vl", "idefics3", "internvl",
    ),
)  # fmt: skip


def find(name: str) -> Architecture:
    """The architecture of that name; UserError with the nearest ones where there is none."""
    found = next((a for a in ZOO if a.name == name), None)
    if found is None:
        hint = did_you_mean(name, [a.name for a in ZOO])
        raise UserError(
            f"--only {name}: the zoo has no such architecture", hint or "`memplan validate --suite zoo` goes through all"
        )
    return found


def compared(architecture: Architecture) -> Comparison:
    """One full training step after another, run for real in this process, beside its prediction."""
    from ..planner.trace.source import TraceSource
    from .api import request_for, run

    request = request_for(architecture.spec(), "cpu", micro_batch_size=BATCH_SIZE, seq_len=architecture.seq_len)
    return run(request, "cpu", isolated=False, traces=TraceSource(exact=True))


def measured(architecture: Architecture) -> dict[str, Any]:
    """`compared` as JSON data: predicted and measured peak, and how many of all phases' and components' figures are equal."""
    comparison = compared(architecture)
    peak = comparison.peak
    if peak is None:
        return {"predicted_bytes": comparison.predicted.peak_bytes, "reason": comparison.reason}
    return {
        "predicted_bytes": peak.predicted_bytes,
        "measured_bytes": peak.measured_bytes,
        "figures": len(comparison.rows),
        "equal_figures": sum(row.difference_bytes == 0 for row in comparison.rows),
        "reason": "",
    }
