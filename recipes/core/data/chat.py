"""A row of a set of dialogues as tokens, and which of them the loss counts. Without torch.

A row has ``messages``, to which the tokenizer's chat template is applied, or ``prompt`` and
``completion``, or ``text``.
"""

import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import numpy as np

from recipes.core import errors, files
from recipes.core.data import hub
from recipes.core.data.documents import Array, digest_of
from recipes.core.errors import InputError

# The fields of each kind of row. A row that has several kinds counts as the first one.
KINDS = {"messages": ("messages",), "prompt": ("prompt", "completion"), "text": ("text",)}
TEMPLATE = re.compile(r"\w[\w.-]*")  # name of a chat template; save_pretrained writes a file of it
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")  # as transformers searches it


class Fault(Enum):
    """What is wrong with a row, and the fix."""

    kind = (
        "is of another kind than the first row",
        "give messages, or prompt and completion, or text, in all rows",
    )
    content = (
        "has content that is not a string, or no role",
        "give each message a role and a string",
    )
    empty = "is empty", "remove it"
    no_turn = "has no assistant's turn", "add a message with the role assistant"
    template = "the chat template fails", "correct the roles and the order of the messages"
    tool_calls = (
        "has tool calls, which the chat template leaves out",
        "give a model whose template writes tool_calls, or write the calls into content",
    )
    prompt = (
        "the chat template does not begin the assistant's turn with its generation prompt",
        "mark the turns in the template with {% generation %}",
    )
    too_long = "has more than max_len tokens", "raise max_len="
    cut_off = "has no token to learn in its first max_len tokens", "raise max_len="


class Unusable(Exception):
    """A row that cannot be used. Its text follows the place of the row in a message."""

    def __init__(self, fault: Fault, detail: str = "") -> None:
        super().__init__(detail and f" ({detail})")
        self.fault = fault


def open_tokenizer(model: str) -> Any:
    """The tokenizer of ``model``, as for `hub.opened`; no code of it is executed. Raises
    InputError, MachineError.
    """
    library = hub.transformers()
    fix = "give the folder of a Hugging Face model that has tokenizer.json"
    with hub.opened(model) as folder:
        try:
            tokenizer = library.AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
            if not tokenizer.is_fast:
                raise ValueError("it cannot tell which characters a token has")
        except BaseException as error:  # whatever its files contain; a panic of Rust, too
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
            raise InputError(f"model={model!r}: {errors.one_line(error, 120)}: {fix}") from None
    templates = tokenizer.chat_template
    for name in templates if isinstance(templates, dict) else ():
        if not TEMPLATE.fullmatch(name):  # transformers before 5.12 would write it anywhere
            problem = f"a chat template has the name {errors.shown(name)}"
            raise InputError(f"model={model!r}: {problem}: give it one of letters and digits")
    return tokenizer


def end_tokens(model: str, tokenizer: Any) -> list[int]:
    """The tokens that end a generated text; first the one to put behind a completion. Raises
    InputError if there is none.
    """
    path = hub.folder_of(model) / "generation_config.json"
    settings = files.read_json(path, files.without_waiting)
    others = np.ravel(settings.get("eos_token_id", [])).tolist()
    tokens = dict.fromkeys([tokenizer.eos_token_id, *others])
    ends = [token for token in tokens if token is not None]
    if not ends:
        fix = "set eos_token in its tokenizer_config.json"
        raise InputError(f"model={model!r}: the tokenizer has no end token: {fix}")
    return ends


def tokenizer_digest(tokenizer: Any) -> str:
    """The same for all tokenizers that make the same tokens of a text."""
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    content |= {"padding": None, "truncation": None}  # of its last call
    return digest_of(content)


def kind_of(row: Any) -> str:
    """The kind of a row; "" if it has none."""
    for kind, names in KINDS.items():
        if isinstance(row, dict) and all(row.get(name) is not None for name in names):
            return kind
    return ""


@dataclass(frozen=True)
class Encoder:
    """Encodes rows. facts: of `dialogues.facts_of`."""

    tokenizer: Any
    facts: Mapping[str, Any]

    def encode(self, row: Any) -> Iterator[tuple[Array, Array, bool]]:
        """The examples of a row: the tokens, int64, which of them the loss counts, and whether it
        counts an end token for each turn of the assistant. Raises Unusable.
        """
        kind = self.facts["kind"]
        if kind_of(row) != kind:
            raise Unusable(Fault.kind)
        encode = self._of_messages if kind == "messages" else self._of_strings
        for tokens, counted in encode(row):
            turns = int((counted & ~np.append(counted[1:], False)).sum())
            ends = np.isin(tokens[counted], self.facts["ends"])
            is_ended = int(ends.sum()) >= turns
            counted |= self.facts["train_on"] == "all"
            counted[:1] = False  # nothing predicts it
            if not counted.any():
                raise Unusable(Fault.empty)
            yield tokens, counted, is_ended

    def _of_strings(self, row: Mapping[str, Any]) -> Iterator[tuple[Array, Array]]:
        """Of a prompt and its completion, or of a text, with an end token behind it."""
        parts = [row[name] for name in KINDS[self.facts["kind"]]]
        if not all(isinstance(part, str) for part in parts):
            raise Unusable(Fault.content)
        *prompt, answer = parts
        if not answer.strip():
            raise Unusable(Fault.empty)
        end = self.tokenizer.convert_ids_to_tokens(self.facts["ends"][0])
        text = "".join(parts).removesuffix(end) + end
        yield self._tokens(text, [(len("".join(prompt)), len(text))])

    def _of_messages(self, row: Mapping[str, Any]) -> Iterator[tuple[Array, Array]]:
        """Of a dialogue: of each of the assistant's turns, also the end token is counted."""
        messages = row["messages"]
        _check(messages)
        # a column of a table is null if a message does not have it
        messages = [
            {name: value for name, value in turn.items() if value is not None or name == "content"}
            for turn in messages
        ]
        try:
            tools = row.get("tools") or None
            tools = json.loads(tools) if isinstance(tools, str) else tools
            render = partial(self.tokenizer.apply_chat_template, tools=tools, tokenize=False)
            if _leaves_out_calls(messages, render):
                raise Unusable(Fault.tool_calls)
            if GENERATION.search(self.tokenizer.get_chat_template(None, tools)):
                output = self.tokenizer.apply_chat_template(
                    messages, tools, return_assistant_tokens_mask=True
                )
                counted = np.array(output["assistant_masks"], bool)
                yield np.array(output["input_ids"], np.int64), counted
                return
            yield from itertools.starmap(self._tokens, _turns(messages, render))
        except Unusable:
            raise
        except Exception as error:  # whatever the template does
            raise Unusable(Fault.template, errors.one_line(error, 80)) from None

    def _tokens(self, text: str, spans: Sequence[tuple[int, int]]) -> tuple[Array, Array]:
        """The tokens of a text, and which of them have characters of ``spans``. A chat template
        writes also the token that begins a text.
        """
        is_whole = self.facts["kind"] == "messages"
        output = self.tokenizer(text, add_special_tokens=not is_whole, return_offsets_mapping=True)
        begins, ends = np.array(output["offset_mapping"], np.int64).reshape(-1, 2).T
        counted = np.zeros(len(begins), bool)
        for first, last in spans:
            counted |= (ends > first) & (begins < last)
        return np.array(output["input_ids"], np.int64), counted


def _check(messages: Any) -> None:
    """Raises Unusable for what is no dialogue with a turn of the assistant."""
    if not isinstance(messages, list) or not all(map(_is_message, messages)):
        raise Unusable(Fault.content)
    turns = [message for message in messages if message["role"] == "assistant"]
    if messages and not turns:
        raise Unusable(Fault.no_turn)
    if not any((turn.get("content") or "").strip() or turn.get("tool_calls") for turn in turns):
        raise Unusable(Fault.empty)


def _is_message(message: Any) -> bool:
    if not isinstance(message, dict):
        return False
    values = message.get("role"), message.get("content") or ""  # a call has no content
    return all(isinstance(value, str) for value in values)


def _leaves_out_calls(messages: Sequence[Mapping[str, Any]], render: Callable[..., str]) -> bool:
    """Whether the text of a dialogue is the same without its tool calls: the model would learn an
    empty turn in place of a call.
    """
    if not any(message.get("tool_calls") for message in messages):
        return False
    others = [
        {name: value for name, value in message.items() if name != "tool_calls"}
        for message in messages
    ]
    try:
        return render(others) == render(messages)
    except Exception:  # some templates refuse the result of a tool without its call
        return False


def _turns(
    messages: Sequence[Mapping[str, Any]], render: Callable[..., str]
) -> Iterator[tuple[str, list[tuple[int, int]]]]:
    """The text of a dialogue, and where the turns of the assistant begin and end in it. Raises
    Unusable.

    A turn begins behind the generation prompt, and ends before the white space that follows its end
    token. Some templates render a turn differently once others follow, for example without its
    thoughts. Such a turn is in a text that ends with it, which is what the model sees.
    """
    text = render(messages)
    spans = []
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            after = render(messages[: i + 1])
            before = render(messages[: i or 1], add_generation_prompt=True)
            if not i:  # a template cannot render a dialogue without messages
                before = before.removeprefix(after)
            if not after.startswith(before):
                raise Unusable(Fault.prompt)
            span = (len(before), len(after.rstrip()))
            if text.startswith(after):
                spans.append(span)
            else:
                yield after, [span]
    if spans:
        yield text, spans
