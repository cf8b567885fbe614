"""What a model is trained to do, and which transformers class does it.  No transformers import here: names only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import UserError, did_you_mean

#: task -> transformers' auto class.  `auto` builds the class that the config's `architectures` names.
AUTO_CLASS = {
    "causal-lm": "AutoModelForCausalLM",
    "masked-lm": "AutoModelForMaskedLM",
    "seq-classification": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
    "question-answering": "AutoModelForQuestionAnswering",
    "seq2seq-lm": "AutoModelForSeq2SeqLM",
    "image-classification": "AutoModelForImageClassification",
    "image-text-to-text": "AutoModelForImageTextToText",
    "ctc": "AutoModelForCTC",
    "speech-seq2seq": "AutoModelForSpeechSeq2Seq",
    "auto": "AutoModel",
}
CUSTOM = "custom"  # a factory: the user's code decides
TASKS = (*AUTO_CLASS, CUSTOM)

#: End of a class name in `architectures` -> task; the first match counts.
_BY_CLASS_NAME = (
    ("ForCausalLM", "causal-lm"),
    ("LMHeadModel", "causal-lm"),
    ("ForMaskedLM", "masked-lm"),
    ("ForSequenceClassification", "seq-classification"),
    ("ForTokenClassification", "token-classification"),
    ("ForQuestionAnswering", "question-answering"),
    ("ForImageClassification", "image-classification"),
    ("ForCTC", "ctc"),
)  # fmt: skip
_SPEECH = frozenset({"whisper", "speech_to_text", "moonshine", "speech-encoder-decoder", "canary", "cohere_asr"})
_SEQ2SEQ = frozenset(
    {"t5", "mt5", "umt5", "longt5", "bart", "mbart", "pegasus", "pegasus_x", "marian", "m2m_100", "blenderbot",
     "blenderbot-small", "led", "bigbird_pegasus", "plbart", "prophetnet", "fsmt", "nllb-moe", "switch_transformers",
     "t5gemma", "encoder-decoder"}
)  # fmt: skip
_MASKED = frozenset(
    {"bert", "roberta", "distilbert", "deberta", "deberta-v2", "albert", "electra", "camembert", "xlm-roberta", "mpnet",
     "modernbert", "mobilebert", "squeezebert", "longformer", "big_bird", "ernie", "esm", "roformer", "convbert", "funnel",
     "nomic_bert", "megatron-bert", "roberta-prelayernorm", "xlm-roberta-xl", "fnet", "ibert", "rembert", "layoutlm"}
)  # fmt: skip
_IMAGE = frozenset(
    {"vit", "deit", "beit", "swin", "swinv2", "dinov2", "dinov2_with_registers", "resnet", "convnext", "convnextv2",
     "regnet", "efficientnet", "mobilenet_v1", "mobilenet_v2", "mobilevit", "mobilevitv2", "levit", "pvt", "pvt_v2",
     "data2vec-vision", "vit_msn", "poolformer", "focalnet", "hiera", "ijepa"}
)  # fmt: skip
_CTC = frozenset({"wav2vec2", "hubert", "wavlm", "unispeech", "unispeech-sat", "wav2vec2-bert", "wav2vec2-conformer", "sew"})


def check_task(task: str, config: Mapping[str, Any] | None = None) -> str:
    """`task` in the project's spelling; `audio` becomes ctc or speech-seq2seq by the architecture."""
    name = task.strip().lower().replace("_", "-")
    if name == "audio":
        return "ctc" if config is not None and default_task(config) == "ctc" else "speech-seq2seq"
    if name not in TASKS:
        raise UserError(f"task: {task!r} is not known", did_you_mean(name, TASKS) or f"Choose one of {', '.join(TASKS)}")
    return name


def default_task(config: Mapping[str, Any]) -> str:
    """The task that the checkpoint's class (`architectures`) names, else the usual one of its family, else `auto`."""
    model_type = str(config.get("model_type", ""))
    names = config.get("architectures") or [""]
    class_name = str(names[0])
    if class_name.endswith("ForConditionalGeneration"):
        if model_type in _SPEECH:
            return "speech-seq2seq"
        return "image-text-to-text" if "vision_config" in config else "seq2seq-lm"
    for ending, task in _BY_CLASS_NAME:
        if class_name.endswith(ending):
            return task
    families = ((_SPEECH, "speech-seq2seq"), (_SEQ2SEQ, "seq2seq-lm"), (_MASKED, "masked-lm"), (_IMAGE, "image-classification"))
    for members, task in (*families, (_CTC, "ctc")):
        if model_type in members:
            return task
    if (
        not class_name
        and "vision_config" in config
        and "text_config" in config
        and {"image_token_id", "image_token_index"} & set(config)
    ):
        return "image-text-to-text"
    # decoders: a config with a vocabulary, no encoder and no second modality
    if not class_name and "vocab_size" in config and not config.get("is_encoder_decoder") and "vision_config" not in config:
        return "causal-lm"
    if class_name.endswith("Model") and "vocab_size" in config and _is_decoder_family(model_type):
        return "causal-lm"
    return "auto"


def _is_decoder_family(model_type: str) -> bool:
    return model_type in {
        "llama", "mistral", "mixtral", "gemma", "gemma2", "gemma3_text", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gpt2",
        "gpt_neox", "gpt_neo", "gptj", "gpt_bigcode", "opt", "bloom", "falcon", "mpt", "phi", "phi3", "stablelm", "olmo",
        "olmo2", "olmoe", "granite", "cohere", "cohere2", "starcoder2", "smollm3", "deepseek_v2", "deepseek_v3", "mamba",
    }  # fmt: skip
