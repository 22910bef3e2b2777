"""Folders of tokenizers for the tests of dialogues, made without a download."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

CORPUS = [
    "You are a helpful assistant. What is the weather in Paris? It is sunny and warm today.",
    'user system assistant tool {"name": "weather", "arguments": {"city": "Paris"}}',
]

# As Qwen's: tools in the system turn, calls as JSON in a turn of the assistant.
CHATML = """\
{%- if tools %}
{{- '<|im_start|>system\\n' + (messages[0].content if messages[0].role == 'system' else '') }}
{%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if not (tools and loop.first and message.role == 'system') %}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
{%- for call in message.tool_calls %}
{{- '<tool_call>' + (call.function | tojson) + '</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# As Llama 3's, with generation tags; content is stripped.
TAGGED = """\
{{- bos_token }}
{%- if tools %}{{ 'tools:' + (tools | tojson) }}{% endif %}
{%- for message in messages %}
{{- '<|head|>' + message.role + '<|/head|>\\n\\n' }}
{%- if message.role == 'assistant' %}
{%- set content = message.content or (message.tool_calls | tojson) %}
{%- generation %}{{ content | trim }}<|eot|>{% endgeneration %}
{%- else %}{{ message.content | trim + '<|eot|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\\n\\n' }}{% endif %}"""

# As Mistral's: the system turn is within the first user's turn, roles must alternate.
INST = """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}
{%- set system = messages[0].content + '\\n\\n' %}{% set turns = messages[1:] %}
{%- else %}{% set system = '' %}{% set turns = messages %}{% endif %}
{%- for message in turns %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('roles must alternate') }}
{%- endif %}
{%- if message.role == 'user' %}
{{- '[INST]' + (system if loop.first else '') + message.content + '[/INST]' }}
{%- else %}{{ ' ' + message.content + eos_token }}{% endif %}
{%- endfor %}"""

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|head|>", "<|/head|>", "<|eot|>", "[INST]", "[/INST]"]


@cache
def _core() -> str:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "</s>", *SPECIAL],
    )
    core.train_from_iterator(CORPUS, trainer)
    return core.to_str()


def make(folder: Path, template: str | None = CHATML, eos: str | None = "<|im_end|>") -> Path:
    """A folder with a tokenizer of bytes and short words, without a pad token."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    special = {"bos_token": "<s>"} | ({"eos_token": eos} if eos else {})
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(_core()), **special)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


def put_rows(path: Path, *rows: object) -> Path:
    """A .jsonl file with these rows. A string is written unchanged as a line."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    return path
