"""Dialogues that are made in memory, the same in each run: what each animal does, which a small
model can learn.
"""

import hashlib
import io
import random
from typing import Any

import numpy as np

from recipes.core.data import dialogues
from recipes.core.data.chat import Encoder
from recipes.core.data.sentences import ADJECTIVES, NOUNS, VERBS
from recipes.core.errors import require

COUNT = 400
# ChatML, the form of many models. The model learns what is between the generation tags.
TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['role'] == 'assistant' %}
{%- generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}
{%- else %}{{ message['content'] + '<|im_end|>' }}{% endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


def made_tokenizer() -> Any:
    """A token for each byte, and those of the chat template."""
    transformers = require("transformers", "llm")
    tokenizers = require("tokenizers", "llm")
    bytes_ = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = {letter: i for i, letter in enumerate(sorted(bytes_.alphabet()))}
    core = tokenizers.Tokenizer(tokenizers.models.BPE(alphabet, []))
    core.pre_tokenizer = bytes_
    core.decoder = tokenizers.decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        extra_special_tokens=["<|im_start|>"],
        chat_template=TEMPLATE,
    )


def made() -> tuple[dialogues.Examples, dialogues.Examples]:
    """Dialogues of one or two questions such as ``What does the old dog do?`` with the answer
    ``It helps the king.`` Each noun has its verb, and each adjective its object.
    """
    draw = random.Random(0)
    rows = []
    for _ in range(COUNT):
        messages = []
        for _ in range(draw.randint(1, 2)):
            noun = draw.randrange(len(NOUNS))
            adjective = draw.randrange(len(ADJECTIVES))
            question = f"What does the {ADJECTIVES[adjective]} {NOUNS[noun]} do?"
            answer = f"It {VERBS[noun % len(VERBS)]}s the {NOUNS[adjective]}."
            messages += [
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer},
            ]
        rows.append(("", {"messages": messages}))

    tokenizer = made_tokenizer()
    facts = dialogues.facts_of("", tokenizer, "messages", "completion")
    facts |= {"max_len": 2**20, "cut": False}
    file = io.BytesIO()
    record = dialogues.write_examples(file, Encoder(tokenizer, facts), rows)
    content = file.getvalue()
    record["sha256"] = hashlib.sha256(content).hexdigest()
    index = {"shards": [record], "training": 1, "val_fraction": 0.1, "seed": 0, "facts": facts}
    return dialogues.divided([np.frombuffer(content, "<u4")], index)
