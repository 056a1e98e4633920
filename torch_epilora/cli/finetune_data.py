"""What `epilora finetune` learns from: question and answer pairs, and their tokens."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

__all__ = ["Chat", "Example", "batches", "collate", "encode", "prompt_text", "read_chats", "split", "word_problems"]

Item = TypeVar("Item")
Chat = list[dict[str, str]]
"""Messages with ``role`` and ``content``; the last one is the assistant's, and what is learnt."""

IGNORED = -100
"""Label of a token that has no loss."""
HELD_OUT_EVERY = 10
ROLES = ("system", "user", "assistant")

_NAMES = ("Ana", "Ben", "Chloe", "David", "Elif", "Femi", "Grace", "Hugo", "Ines", "Jonas", "Kofi", "Lena")
_ITEMS = ("apples", "books", "candles", "coins", "eggs", "marbles", "pencils", "shells", "stamps", "tickets")
_PLACES = ("at the market", "in the attic", "on the way home", "in the garden", "at school", "by the sea")
# What happens to a number of things: the sentence, the sign, and the question.
_STORIES = (
    ("{name} has {a} {item}. {place} {name} finds {b} more.", "+", "How many {item} does {name} have now?"),
    ("{name} has {a} {item} and a friend brings {b} {item} {place}.", "+", "How many {item} are there together?"),
    ("{name} had {a} {item}. {place} {name} gives away {b} of them.", "-", "How many {item} are left?"),
    ("There were {a} {item} in a box. {name} takes out {b} {place}.", "-", "How many {item} stay in the box?"),
    ("{name} packs {a} bags {place}, with {b} {item} in each.", "*", "How many {item} are that in all?"),
)


class Example(NamedTuple):
    """A chat's tokens, and how many of them come before the answer."""

    tokens: list[int]
    prompt: int


def word_problems(count: int = 400, seed: int = 0, largest: int = 49) -> list[Chat]:
    """Make different arithmetic word problems, answered as a JSON object with ``working``, ``answer`` and ``unit``.

    Parameters
    ----------
    count : int
        How many.
    seed : int
        The same seed gives the same problems.
    largest : int
        Largest number to add to or take from, at least 12: the larger, the more there is to learn.

    Returns
    -------
    list of Chat
        Each a question and its answer, in a random order.
    """
    draw = random.Random(seed)
    found: dict[str, str] = {}
    while len(found) < count:
        story, sign, asked = draw.choice(_STORIES)
        a, b = draw.randint(2, largest // 5), draw.randint(2, 9)
        if sign != "*":
            a, b = draw.randint(largest // 4, largest), draw.randint(2, largest // 4 - 1)
        words = {"name": draw.choice(_NAMES), "item": draw.choice(_ITEMS), "a": a, "b": b}
        place = draw.choice(_PLACES)
        place = place.capitalize() + "," if ". {place}" in story else place
        result = {"+": a + b, "-": a - b, "*": a * b}[sign]
        answer = {"working": f"{a} {sign} {b} = {result}", "answer": result, "unit": words["item"]}
        found[f"{story} {asked}".format(**words, place=place)] = json.dumps(answer)
    return [_chat(question, answer) for question, answer in found.items()]


def read_chats(path: Path) -> list[Chat]:
    """Read a JSONL file of ``{"prompt": ..., "completion": ...}`` or ``{"messages": [...]}``, one a line.

    Parameters
    ----------
    path : Path
        The file, UTF-8. Empty lines are skipped.

    Returns
    -------
    list of Chat
        At least two.

    Raises
    ------
    ValueError
        The file cannot be read, holds fewer than two chats, or a line is neither form; the line is named.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # splitlines() also cuts at what JSON has inside of texts
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"data {path}: expected a JSONL file in UTF-8, got {error}. Name another file.") from error
    chats = [_read(line, f"data {path}, line {i}") for i, line in enumerate(lines, 1) if line.strip()]
    if len(chats) < 2:
        raise ValueError(
            f"data {path}: expected at least 2 lines, one to learn from and one to test with, got {len(chats)}. "
            "Add some."
        )
    return chats


def _chat(question: str, answer: str) -> Chat:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _read(line: str, where: str) -> Chat:
    expected = 'expected {"prompt": text, "completion": text} or {"messages": [...]}'
    try:
        record = json.loads(line)
        json.dumps(record, ensure_ascii=False).encode()  # half a surrogate pair is JSON, but no text
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: {expected}, got no JSON: {error}. Write one JSON object a line.") from error
    if not isinstance(record, dict):
        raise ValueError(f"{where}: {expected}, got {type(record).__name__}. Write one JSON object a line.")
    if "messages" in record:
        return _read_messages(record["messages"], where)
    values = [record.get(key) for key in ("prompt", "completion")]
    if not all(isinstance(value, str) and value for value in values):
        raise ValueError(
            f"{where}: {expected}, got the keys {sorted(map(str, record))}. Both texts are needed, and not empty."
        )
    return _chat(*map(str, values))


def _read_messages(messages: Any, where: str) -> Chat:
    fits = isinstance(messages, list) and len(messages) >= 2
    if not fits or not all(
        isinstance(m, dict) and m.get("role") in ROLES and isinstance(m.get("content"), str) for m in messages
    ):
        raise ValueError(
            f'{where}: messages: expected at least two of {{"role": {" or ".join(ROLES)}, "content": text}}, got '
            f"{str(messages)[:80]}. Other roles and contents that are no text cannot be learnt from."
        )
    if messages[-1]["role"] != "assistant" or not messages[-1]["content"]:
        raise ValueError(
            f"{where}: messages: expected an answer of the assistant as the last one, got {str(messages[-1])[:80]}. "
            "The last message is what is learnt."
        )
    return [{"role": m["role"], "content": m["content"]} for m in messages]


def split(items: Sequence[Item]) -> tuple[list[Item], list[Item]]:
    """Hold out every tenth item, the first among them; return what is learnt from and what is held out."""
    learnt = [item for i, item in enumerate(items) if i % HELD_OUT_EVERY]
    return learnt, list(items[::HELD_OUT_EVERY])


def encode(tokenizer: Any, chats: Sequence[Chat], longest: int | None = None) -> list[Example]:
    """Tokenize chats: the prompt by the tokenizer's chat template, then the answer and the end of sequence.

    Parameters
    ----------
    tokenizer : transformers tokenizer
        Without a chat template, the prompt is the messages' texts, a line each.
    chats : sequence of Chat
        What to tokenize.
    longest : int, optional
        The model's longest sequence.

    Returns
    -------
    list of Example
        One a chat.

    Raises
    ------
    ValueError
        A chat is longer than ``longest`` or does not fit the chat template, or the tokenizer has no token for the end
        of a sequence.
    """
    from jinja2 import TemplateError

    if tokenizer.eos_token_id is None:
        raise ValueError("tokenizer: expected an eos_token, which ends an answer, got none. Set it in the tokenizer.")
    examples = []
    for i, chat in enumerate(chats):
        try:
            text = prompt_text(tokenizer, chat[:-1])
        except TemplateError as error:
            raise ValueError(
                f"chat {i + 1} ({chat[0]['content'][:40]!r}...): expected messages that the tokenizer's chat template "
                f"takes, got from it: {error}. Change the messages, or the template."
            ) from error
        prompt = tokenizer(text, add_special_tokens=not tokenizer.chat_template)
        answer = tokenizer(chat[-1]["content"], add_special_tokens=False)["input_ids"]
        tokens = [*prompt["input_ids"], *answer, tokenizer.eos_token_id]
        if longest is not None and len(tokens) > longest:
            raise ValueError(
                f"chat {i + 1} ({chat[0]['content'][:40]!r}...): expected at most {longest} tokens, the model's "
                f"longest sequence, got {len(tokens)}. Shorten it or leave it out."
            )
        examples.append(Example(tokens, len(prompt["input_ids"])))
    return examples


def prompt_text(tokenizer: Any, messages: Chat) -> str:
    """Return what a model is asked, up to where its answer begins."""
    if tokenizer.chat_template:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return "".join(f"{message['content']}\n" for message in messages)


def collate(examples: Sequence[Example], pad: int, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """Pad examples on the right into a model's arguments; only the answers' tokens have labels other than -100.

    Parameters
    ----------
    examples : sequence of Example
        One a row.
    pad : int
        Token to pad with.
    device : torch.device or str
        Where the batch goes.

    Returns
    -------
    dict
        ``input_ids``, ``attention_mask`` and ``labels``, int64 [len(examples), longest].
    """
    longest = max(len(example.tokens) for example in examples)
    rows: dict[str, list[list[int]]] = {"input_ids": [], "attention_mask": [], "labels": []}
    for tokens, prompt in examples:
        rest = longest - len(tokens)
        rows["input_ids"].append([*tokens, *[pad] * rest])
        rows["attention_mask"].append([1] * len(tokens) + [0] * rest)
        rows["labels"].append([*[IGNORED] * prompt, *tokens[prompt:], *[IGNORED] * rest])
    return {name: torch.tensor(row, device=device) for name, row in rows.items()}


def batches(examples: Sequence[Example], size: int, seed: int) -> Iterator[list[Example]]:
    """Yield batches for ever, epoch by epoch, each epoch in an order of its own that the seed decides."""
    draw = random.Random(seed)
    queue: list[Example] = []
    while True:
        while len(queue) < size:
            queue += draw.sample(examples, len(examples))
        yield queue[:size]
        queue = queue[size:]
