"""Example batches: what a data loader would hand to the model, made from the config alone, the same every time.

Sizes: `batch_size` samples, `seq_len` tokens; for raw audio (wav2vec2 and kin) `seq_len` counts samples of sound, 16,000 a
second; image models ignore it. `target_len` is the length of the labels where they are a sequence of their own (tokens).
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ..errors import UserError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

#: Families whose tokenizer returns token_type_ids, so that a Trainer passes them on.
_TOKEN_TYPES = frozenset({"bert", "albert", "electra", "mobilebert", "convbert", "roformer", "funnel", "deberta", "deberta-v2",
                          "big_bird", "megatron-bert", "rembert", "layoutlm", "ernie", "nystromformer", "fnet"})  # fmt: skip
_WAVE_FRAMES_PER_LABEL = 4  # a spoken character lasts about 4 of wav2vec2's 20 ms frames
_SPEECH_SAMPLES = 160_000  # 10 s at 16 kHz, where `seq_len` counts the transcript's tokens
_IMAGE_PX = 224  # for a vision config that names no size (ResNet, ConvNeXt take any)


class Inputs:
    """Makes the batches of one transformers model and turns its output into a loss.

    `notes` says where the batch stands for less than a real one (no images for a multimodal model, a made-up loss).
    """

    def __init__(self, *, config: Any, task: str, module: nn.Module, dtype: torch.dtype) -> None:
        self.config, self.task, self.dtype = config, task, dtype
        self.text = config.get_text_config() if hasattr(config, "get_text_config") else config
        parameters = inspect.signature(module.forward).parameters
        self.accepted = set(parameters)
        self.required = {
            name
            for name, parameter in parameters.items()
            if parameter.default is parameter.empty
            and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        }
        self.main_input = str(getattr(module, "main_input_name", "input_ids"))
        self.notes: list[str] = []
        if task == "image-text-to-text" or (getattr(config, "vision_config", None) is not None and task == "causal-lm"):
            self.notes.append("the batch is text only: images, and the vision tower's activations, are not counted")
        if task == "ctc":
            self.notes.append("in a trace, blocks of the sizes that CTC's loss makes stand for it: its own depend on values")
        if task == "auto" and "labels" not in self.accepted and not self._has_contrastive_loss():
            self.notes.append("the model has no loss of its own: the mean of its outputs stands for one")

    def make(
        self, batch_size: int, seq_len: int, *, target_len: int | None = None, image_size: int | None = None
    ) -> dict[str, Tensor]:
        """The keyword arguments of one forward pass, labels included: no id is a special one, floats have the model's dtype."""
        makers = {"pixel_values": self._image, "input_features": self._speech, "input_values": self._wave}
        main = self.main_input
        if main == "input_ids" and main not in self.accepted:  # the default of the class's attribute says nothing
            main = next((name for name in makers if name in self.required), main)
        make = makers.get(main, self._tokens) if self.task != "image-text-to-text" else self._tokens
        unknown = self.required - {*makers, "input_ids"}  # nothing can be made where these are all that forward takes
        batch = make(batch_size, seq_len, target_len, image_size) if main in self.accepted or not unknown else {}
        missing = sorted(self.required - set(batch))
        if missing:
            raise UserError(
                f"{self.config.model_type}: forward needs {', '.join(missing)}, which the config does not describe",
                "Give a factory FILE.py:FUNCTION that returns (module, batch_fn)",
            )
        return batch

    def step(self, module: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        """One forward pass; the model's own loss, or the mean of its floating outputs where it has none."""
        if self.task == "ctc" and _is_fake(batch.get("labels")):
            return _ctc_stand_in(module, batch)
        output = module(**batch, return_loss=True) if self._has_contrastive_loss() else module(**batch)
        loss = getattr(output, "loss", None)
        if loss is None:
            means = [tensor.float().mean() for tensor in _float_tensors(output)]
            if not means:
                raise UserError(
                    f"{type(module).__name__}: the output holds no floating tensor to train on", "Choose another --task"
                )
            loss = sum(means[1:], means[0])
        return loss

    def _tokens(self, batch_size: int, seq_len: int, target_len: int | None, image_size: int | None) -> dict[str, Tensor]:
        import torch

        ids = self._ids(batch_size, seq_len)
        batch = {"input_ids": ids}
        if self.task == "causal-lm":
            batch["labels"] = ids.clone()  # packed text: the usual loader passes no mask
            if getattr(self.config, "vision_config", None) is not None and "token_type_ids" in self.accepted:
                batch["token_type_ids"] = torch.zeros_like(ids)
            return batch
        if "attention_mask" in self.accepted:
            batch["attention_mask"] = torch.ones(batch_size, seq_len, dtype=torch.long, device="cpu")
        if "token_type_ids" in self.accepted and (
            self.config.model_type in _TOKEN_TYPES or getattr(self.config, "vision_config", None) is not None
        ):
            batch["token_type_ids"] = torch.zeros(batch_size, seq_len, dtype=torch.long, device="cpu")
        if "pixel_values" in self.required:
            batch["pixel_values"] = self._pixels(batch_size, getattr(self.config, "vision_config", self.config), image_size)
        if self.task == "auto":
            return self._generic(batch, batch_size, seq_len, target_len, image_size)
        if self.task in ("seq2seq-lm", "speech-seq2seq"):
            batch["labels"] = self._ids(batch_size, target_len or seq_len)
        elif self.task == "seq-classification":
            batch["labels"] = self._classes(batch_size)
            if getattr(self.config, "is_encoder_decoder", False):  # T5, BART: the head reads the hidden state of the last </s>
                batch["input_ids"] = torch.cat([ids[:, :-1], torch.full_like(ids[:, -1:], self._eos())], dim=1)
        elif self.task == "token-classification":
            batch["labels"] = self._range(self._num_labels(), batch_size, seq_len)
        elif self.task == "question-answering":
            batch["start_positions"] = self._range(seq_len, batch_size)
            batch["end_positions"] = self._range(seq_len, batch_size)
        else:  # masked-lm and image-text-to-text: one label a token
            batch["labels"] = ids.clone()
        return batch

    def _generic(
        self, batch: dict[str, Tensor], batch_size: int, seq_len: int, target_len: int | None, image_size: int | None
    ) -> dict[str, Tensor]:
        vision = getattr(self.config, "vision_config", None) or (self.config if hasattr(self.config, "image_size") else None)
        if "pixel_values" in self.accepted and vision is not None:  # ViLT has no vision_config: its size is its own
            batch["pixel_values"] = self._pixels(batch_size, vision, image_size)
        if "labels" in self.accepted:
            batch["labels"] = self._ids(batch_size, target_len or seq_len)
        elif "decoder_input_ids" in self.accepted and getattr(self.config, "is_encoder_decoder", False):
            batch["decoder_input_ids"] = self._ids(batch_size, target_len or seq_len)
        return {name: value for name, value in batch.items() if name in self.accepted}

    def _image(self, batch_size: int, seq_len: int, target_len: int | None, image_size: int | None) -> dict[str, Tensor]:
        own = _side(getattr(self.config, "image_size", None))
        if image_size is not None and own is not None and image_size != own and "interpolate_pos_encoding" in self.accepted:
            raise UserError(f"image size: {self.config.model_type} has positions for {own} px, got {image_size}",
                            f"Build it for that size with --set image_size={image_size}")  # fmt: skip
        vision = self.config if own is not None else getattr(self.config, "vision_config", None) or self.config
        batch = {"pixel_values": self._pixels(batch_size, vision, image_size)}
        if "input_ids" in self.required:  # a detector that is told in words what to find
            batch["input_ids"] = self._ids(batch_size, seq_len)
        if "decoder_input_ids" in self.accepted and "labels" in self.accepted:  # image to text
            batch["labels"] = self._ids(batch_size, target_len or seq_len)
        elif self.task == "image-classification":
            batch["labels"] = self._classes(batch_size)
        return batch

    def _speech(self, batch_size: int, seq_len: int, target_len: int | None, image_size: int | None) -> dict[str, Tensor]:
        """Log-mel spectrograms: Whisper's [batch, mel bins, 2 x max_source_positions] (30 s), others' [batch, frames, bins]."""
        keys = ("num_mel_bins", "input_feat_per_channel", "feature_size", "feature_projection_input_dim")
        parts = [self.config, *(getattr(self.config, part, None) for part in ("encoder_config", "audio_config"))]
        bins = next((v for part in parts for v in (getattr(part, key, None) for key in keys) if v), 80)
        positions = int(getattr(self.config, "max_source_positions", None) or 4 * seq_len)
        if self.config.model_type == "whisper":
            shape: tuple[int, ...] = (batch_size, bins, 2 * positions)  # its second convolution has stride 2
        else:
            shape = (batch_size, positions, bins)
        batch = {"input_features": self._floats(*shape)}
        if "labels" in self.accepted:  # an encoder by itself has none
            batch["labels"] = self._ids(batch_size, target_len or seq_len)
        return batch

    def _wave(self, batch_size: int, seq_len: int, target_len: int | None, image_size: int | None) -> dict[str, Tensor]:
        bins = getattr(self.config, "num_mel_bins", None)
        if self.task == "speech-seq2seq":
            batch = {"input_values": self._floats(batch_size, _SPEECH_SAMPLES)}
            batch["labels"] = self._ids(batch_size, target_len or seq_len)
            return batch
        if bins and getattr(self.config, "max_length", None):  # a spectrogram under the name of a wave (AST)
            batch = {"input_values": self._floats(batch_size, self.config.max_length, bins)}
        elif hasattr(self.config, "codebook_size"):  # a codec takes [batch, channels, samples]
            batch = {"input_values": self._floats(batch_size, getattr(self.config, "audio_channels", 1), seq_len)}
        else:
            batch = {"input_values": self._floats(batch_size, seq_len)}
        if self.task == "ctc":
            frames = seq_len
            for kernel, stride in zip(
                getattr(self.config, "conv_kernel", ()), getattr(self.config, "conv_stride", ()), strict=True
            ):
                frames = (frames - kernel) // stride + 1
            if frames < 1:
                raise UserError(f"sequence length: {seq_len} samples of sound are too few for {self.config.model_type}",
                                "--seq counts samples, 16000 a second: write for example --seq 160000 for 10 s")  # fmt: skip
            batch["labels"] = self._ids(batch_size, target_len or max(1, frames // _WAVE_FRAMES_PER_LABEL))
        elif self.task == "seq-classification" or "labels" in self.accepted:
            batch["labels"] = self._classes(batch_size)
        return batch

    def _pixels(self, batch_size: int, vision: Any, image_size: int | None) -> Tensor:
        size = getattr(vision, "image_size", None)
        sides = tuple(size) if isinstance(size, (list, tuple)) and len(size) == 2 else (_side(size) or _IMAGE_PX,) * 2
        if image_size is not None:
            sides = (image_size, image_size)
        frames = getattr(vision, "num_frames", None)  # video: [batch, frames, channels, height, width]
        return self._floats(batch_size, *([frames] if frames else []), getattr(vision, "num_channels", 3), *sides)

    def _ids(self, batch_size: int, length: int) -> Tensor:
        low, high = ordinary_ids(self.text)
        return self._range(high - low, batch_size, length) + low

    def _classes(self, batch_size: int) -> Tensor:
        import torch

        labels = self._num_labels()
        if getattr(self.config, "problem_type", None) == "multi_label_classification":
            return torch.zeros(batch_size, labels, dtype=torch.float32, device="cpu")
        if labels == 1:  # transformers takes one label for a regression
            return torch.zeros(batch_size, dtype=self.dtype, device="cpu")
        return self._range(labels, batch_size)

    def _eos(self) -> int:
        eos = getattr(self.text, "eos_token_id", None)
        return int(eos[0] if isinstance(eos, list) else eos or 0)

    def _num_labels(self) -> int:
        return max(1, int(getattr(self.config, "num_labels", 2)))

    def _has_contrastive_loss(self) -> bool:
        return self.task == "auto" and "return_loss" in self.accepted  # CLIP and kin: forward computes the loss when asked

    @staticmethod
    def _range(modulus: int, *shape: int) -> Tensor:
        import torch

        count = 1
        for size in shape:
            count *= size
        return (torch.arange(count, dtype=torch.long, device="cpu") % modulus).reshape(shape)

    def _floats(self, *shape: int) -> Tensor:
        """Values in [0, 1), spread over the tensor so that a real run has gradients."""
        import torch

        return (self._range(251, *shape).to(torch.float32) / 251).to(self.dtype)


def _is_fake(value: Any) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(value, FakeTensor)


def _ctc_stand_in(module: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """CTC's loss where tensors hold no values: torch cannot tell the sizes inside `_ctc_loss` from shapes alone.

    Allocates, keeps and drops what the real one does (ATen/native/LossCTC.cpp, and its CUDA twin): the fp32 log-softmax, the
    targets in one row, the lattice [batch, frames, 2 x labels + 1], and in backward a second lattice and the gradient.
    """
    import torch

    class Lattice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, log_probs: Tensor, targets: Tensor, longest: int) -> Tensor:
            frames, samples, _ = log_probs.shape
            likelihood = log_probs.new_empty(samples)
            alpha = log_probs.new_empty(samples, frames, 2 * longest + 1)
            ctx.save_for_backward(log_probs, targets, likelihood, alpha)
            return likelihood

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
            log_probs, _, _, alpha = ctx.saved_tensors
            grad = torch.full_like(log_probs, -torch.inf)
            beta = torch.empty_like(alpha)
            del beta
            return grad, None, None

    labels = batch["labels"]
    inputs = next(value for key, value in batch.items() if key != "labels")
    held: list[Any] = []  # a variable of the model's forward, which computes the loss itself
    base = getattr(module, "base_model", module)
    hook = None if base is module else base.register_forward_hook(lambda _, args, output: held.append(output))
    logits = module(**{key: value for key, value in batch.items() if key != "labels"}).logits
    if hook is not None:
        hook.remove()
    mask = inputs.new_ones(inputs.shape[:2], dtype=torch.long)  # transformers' stand-in for a missing attention_mask
    lengths = mask.sum(-1)
    targets = labels.reshape(-1).clone()  # masked_select: one row of all that is no padding
    log_probs = torch.nn.functional.log_softmax(logits, dim=-1, dtype=torch.float32).transpose(0, 1)
    loss: Tensor = Lattice.apply(log_probs, targets, labels.shape[1]).sum()  # type: ignore[no-untyped-call]
    held.clear()
    del mask, lengths
    return loss


def ordinary_ids(config: Any) -> tuple[int, int]:
    """The widest range low..high-1 of token ids that holds no special token of `config`."""
    vocab = getattr(config, "vocab_size", None)
    if not isinstance(vocab, int) or vocab < 1:
        raise UserError(
            f"{config.model_type}: the config has no vocab_size, so no example batch can be made",
            "Add it with --set vocab_size=N, or give a factory FILE.py:FUNCTION with a batch_fn",
        )
    special = {-1, vocab}
    for key in dir(config):
        if key.endswith(("_token_id", "_token_index")):
            value = getattr(config, key, None)
            special |= {v for v in (value if isinstance(value, list) else [value]) if isinstance(v, int) and 0 <= v < vocab}
    edges = sorted(special)
    low, high = max(((a + 1, b) for a, b in itertools.pairwise(edges)), key=lambda gap: gap[1] - gap[0])
    return (low, high) if high > low else (0, vocab)


def _side(size: Any) -> int | None:
    if isinstance(size, int):
        return size
    return int(size[0]) if isinstance(size, (list, tuple)) and size else None


def _float_tensors(output: Any) -> Iterator[Tensor]:
    import torch

    values = output.values() if isinstance(output, Mapping) else output if isinstance(output, (tuple, list)) else [output]
    for value in values:
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.requires_grad:
            yield value
