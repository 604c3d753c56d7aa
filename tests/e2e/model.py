"""A tiny Llama with random weights of its own, and a tokenizer to go with it: nothing is downloaded.

    python -m tests.e2e.model <directory>

The weights are drawn wide enough for attention to be sharp: a text's continuation depends on all of its tokens, so KV
that was lost, mixed up or stored under a wrong hash shows in the output.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

VOCABULARY = 1000
WEIGHT_STD = 0.15
CHAT_TEMPLATE = "{% for message in messages %}{{ message['role'] }} {{ message['content'] }} {% endfor %}assistant"
CONFIG = Path(__file__).with_name("tiny_llama.json")


def words() -> list[str]:
    """The tokenizer's whole vocabulary: token n is the word number n."""
    special = ["<unk>", "<s>", "</s>", "user", "assistant", "system"]
    return special + [f"w{number}" for number in range(len(special), VOCABULARY)]


def make_model(directory: Path) -> None:
    """Write config, weights and tokenizer."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(20)
    config = LlamaConfig(**json.loads(CONFIG.read_text()), initializer_range=WEIGHT_STD)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)

    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words())}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", chat_template=CHAT_TEMPLATE
    )
    fast.save_pretrained(directory)


if __name__ == "__main__":
    make_model(Path(sys.argv[1]))
