"""A text that is made in memory, the same in each run. To predict it, a model must learn the order
of letters and attend to far ones.
"""

import hashlib
import random

import numpy as np

from recipes.core.data.text import Text, open_tokenizer

SIZE = 1_000_000  # characters
NOUNS = (
    "bird",
    "dog",
    "queen",
    "farmer",
    "girl",
    "boy",
    "king",
    "ship",
    "tree",
    "lamp",
    "cat",
    "river",
)
VERBS = ("see", "hear", "like", "follow", "help", "find", "need", "meet")
ADJECTIVES = ("old", "small", "red", "quiet", "tall", "young", "green", "brave")
BRACKETS = (("(", ")"), ("[", "]"), ("{", "}"))


def made() -> Text:
    """Documents of sentences such as ``Tovaki says the old dogs [that the bird sees] help the
    king.``

    Names are drawn for each document and occur again in it; brackets are nested; a verb agrees with
    a noun that can be far before it.
    """
    draw = random.Random(0)
    encode, vocabulary, end = open_tokenizer("bytes")
    tokens = list[int]()
    while len(tokens) < SIZE:
        names = [_name(draw), _name(draw)]
        sentences = []
        for _ in range(8):
            subject, verb = _noun(draw, 3)
            other, _ = _noun(draw, 1)
            sentences.append(f"{draw.choice(names)} says {subject} {verb} {other}.")
        tokens += [*encode(" ".join(sentences)), end]
    array = np.array(tokens, np.uint16)
    return Text([array], vocabulary, end, hashlib.sha256(array.tobytes()).hexdigest())


def _name(draw: random.Random) -> str:
    syllables = [draw.choice("BDKLMNRSTVbdklmnrstv") + draw.choice("aeiou") for _ in range(3)]
    return "".join(syllables).title()


def _noun(draw: random.Random, depth: int) -> tuple[str, str]:
    """A noun, perhaps with an adjective and a clause in brackets of up to ``depth`` levels, and a
    verb that agrees with it.
    """
    plural = draw.random() < 0.5
    words = ["the"]
    if draw.random() < 0.5:
        words.append(draw.choice(ADJECTIVES))
    words.append(draw.choice(NOUNS) + "s" * plural)
    if depth and draw.random() < 0.5:
        opening, closing = draw.choice(BRACKETS)
        other, verb = _noun(draw, depth - 1)
        words.append(f"{opening}that {other} {verb}{closing}")
    return " ".join(words), draw.choice(VERBS) + "s" * (not plural)
