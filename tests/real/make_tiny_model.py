"""Make a Llama of two layers with random weights, for tests of real vLLM workers without a download.

Runs in vLLM's own environment, which brings `torch`, `transformers` and `tokenizers`:

    /path/to/vllm-env/bin/python tests/real/make_tiny_model.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CONTEXT_TOKENS = 2048
VOCABULARY = 512
END = "<|end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SENTENCES = (
    "The gate lets through what the turbine can use, and the rest flows over the weir.",
    "Water that waits above the dam is work that has not been done yet.",
    "A pipe too narrow loses its head; a pipe too wide costs more than it carries.",
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer; every text can be encoded."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=END, chat_template=CHAT_TEMPLATE
    )


def make_model() -> LlamaForCausalLM:
    """Return the model; its weights are wide enough that the text depends on the whole prompt."""
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=CONTEXT_TOKENS,
        initializer_range=0.2,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16)


def main(folder: str) -> None:
    """Write model and tokenizer into `folder`."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    make_model().save_pretrained(path)
    make_tokenizer().save_pretrained(path)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: make_tiny_model.py FOLDER")
    main(sys.argv[1])
