"""Writes a small Llama with random weights in Hugging Face's files, so that real engines can be tried without a download."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from penstock.core.errors import ConfigError, unwritable
from penstock.core.flags import flag

END: Final = "<|end|>"
"""Ends an answer; token 0."""
HEAD_SIZE: Final = 80
"""Chosen: vLLM 0.32 on a processor with AMX takes a kernel for multiples of 32 that dies of an illegal
instruction where a process' first prompt is short; of others it knows 80 and 112 only."""
MIN_VOCABULARY: Final = 512
CHAT_TEMPLATE: Final = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_SENTENCES: Final = (
    "The gate lets through what the turbine can use, and the rest flows over the weir.",
    "Water that waits above the dam is work that has not been done yet.",
    "A pipe too narrow loses its head; a pipe too wide costs more than it carries.",
)
_WEIGHT_DEVIATION: Final = 0.2
"""Chosen: ten times a trained model's, so that each token depends on the entire prompt."""


@dataclass(frozen=True, slots=True)
class RandomModel:
    """Sizes of the model; the defaults make a file of a megabyte, the help of its fields is the command line's.

    Entries of the vocabulary beyond what the tokenizer is trained on stand for words of their own, so that an engine
    that invents tokens, as Dynamo's mocker does, answers with text.
    """

    layers: int = flag("How many decoder layers, 1 to 128.", default=2, ge=1, le=128)
    hidden_size: int = flag(
        "How many values a token has, a multiple of 80 up to 8000; more are slower.",
        default=160,
        ge=80,
        le=8000,
    )
    context_tokens: int = flag(
        "Maximum number of tokens of prompt plus output.", default=2048, ge=1, le=1 << 20
    )
    seed: int = flag("Seed of the random weights.", default=7, ge=0)
    vocabulary: int = flag(
        "How many tokens the tokenizer knows; Dynamo's mocker answers with ids up to 2000.",
        default=MIN_VOCABULARY,
        ge=MIN_VOCABULARY,
        le=1 << 18,
    )

    def __post_init__(self) -> None:
        """Refuse a width that makes no whole number of heads."""
        if self.hidden_size % HEAD_SIZE:
            raise ConfigError(
                f"--hidden-size: {self.hidden_size} is not a multiple of {HEAD_SIZE}, the size of an attention head; "
                f"use {max(1, round(self.hidden_size / HEAD_SIZE)) * HEAD_SIZE}"
            )


def write_model(folder: Path, model: RandomModel, *, replace: bool = False) -> tuple[Path, ...]:
    """Write a model."""
    contents = {
        "config.json": _json(_config(model)),
        "generation_config.json": _json({"eos_token_id": 0, "pad_token_id": 0}),
        "model.safetensors": safetensors(_weights(model)),
        "tokenizer.json": _tokenizer(model.vocabulary).encode(),
        "tokenizer_config.json": _json(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": END,
                "pad_token": END,
                "chat_template": CHAT_TEMPLATE,
                "clean_up_tokenization_spaces": False,
            }
        ),
    }
    try:
        others = [name for name, content in contents.items() if _holds_another(folder / name, content)]
        if others and not replace:
            raise ConfigError(
                f"{folder}: holds another model, by {', '.join(others)}; choose another folder, or replace it: --replace"
            )
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            (folder / name).write_bytes(content)
    except OSError as exc:
        raise ConfigError(unwritable(str(folder), exc)) from exc
    return tuple(folder / name for name in contents)


def _holds_another(path: Path, content: bytes) -> bool:
    return path.exists() and path.read_bytes() != content


def safetensors(tensors: Mapping[str, npt.NDArray[np.float32]]) -> bytes:
    """Return tensors rounded to bfloat16 in the safetensors format.

    Source: huggingface.co/docs/safetensors: length of the header (8 bytes, little-endian), header, data.

    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    parts: list[bytes] = []
    end = 0
    for name, tensor in tensors.items():
        bits = np.ascontiguousarray(tensor, np.float32).view(np.uint32)
        parts.append(((bits + 0x8000) >> 16).astype("<u2").tobytes())
        begin, end = end, end + len(parts[-1])
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [begin, end]}
    words = json.dumps(header, separators=(",", ":")).encode()
    words += b" " * (-len(words) % 8)
    return b"".join((len(words).to_bytes(8, "little"), words, *parts))


def _weights(model: RandomModel) -> dict[str, npt.NDArray[np.float32]]:
    rng = np.random.default_rng(model.seed)
    width, inner = model.hidden_size, 2 * model.hidden_size

    def drawn(*shape: int) -> npt.NDArray[np.float32]:
        return rng.standard_normal(shape, np.float32) * np.float32(_WEIGHT_DEVIATION)

    ones = np.ones(width, np.float32)
    tensors = {"model.embed_tokens.weight": drawn(model.vocabulary, width)}
    for layer in range(model.layers):
        at = f"model.layers.{layer}"
        tensors |= {f"{at}.self_attn.{each}_proj.weight": drawn(width, width) for each in "qkvo"}
        tensors |= {f"{at}.mlp.{each}_proj.weight": drawn(inner, width) for each in ("gate", "up")}
        tensors[f"{at}.mlp.down_proj.weight"] = drawn(width, inner)
        tensors |= {f"{at}.{each}_layernorm.weight": ones for each in ("input", "post_attention")}
    return {**tensors, "model.norm.weight": ones, "lm_head.weight": drawn(model.vocabulary, width)}


def _config(model: RandomModel) -> dict[str, Any]:
    heads = model.hidden_size // HEAD_SIZE
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": model.vocabulary,
        "hidden_size": model.hidden_size,
        "intermediate_size": 2 * model.hidden_size,
        "num_hidden_layers": model.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": HEAD_SIZE,
        "max_position_embeddings": model.context_tokens,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }


def _tokenizer(vocabulary: int) -> str:
    """Return the file of a byte-level tokenizer: every text can be encoded, common words are one token."""
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: PLC0415 - an extra
    except ImportError as exc:
        raise ConfigError(
            "make-model: needs the package tokenizers; pip install 'penstock[tokenizer]'"
        ) from exc
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=MIN_VOCABULARY,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_SENTENCES, trainer)
    text: str = tokenizer.to_str()
    return text if vocabulary == MIN_VOCABULARY else _filled(text, vocabulary)


def _filled(tokenizer: str, vocabulary: int) -> str:
    """Return a tokenizer whose every id below ``vocabulary`` has text; the new ones never come of encoding."""
    content = json.loads(tokenizer)
    entries = content["model"]["vocab"]
    entries.update({f"w{number}.": number for number in range(len(entries), vocabulary)})
    return json.dumps(content)


def _json(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, indent=2).encode() + b"\n"
