"""A tokenizer for the toy model of the shared swarm: ids are pieces of UTF-8, so that a token is seldom a letter."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from swarm_helpers import VOCAB, free_cache

TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
WORDS = "th in er an ou re on at en nd ti es or te of ed is it al ar st to nt ng se ha as ve me hi de le co"


def make_tokenizer(path: Path, *, chat: bool = True) -> Any:
    """Byte-level, with `VOCAB` ids: printable ASCII, bytes of two- to four-byte sequences, and some merged pieces."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pieces: dict[str, int] = {}
    for value in (*range(32, 127), 10, *range(0x80, 0xC0), *range(0xC3, 0xD0), 0xE2, 0xE3, 0xE4, 0xE5, 0xF0):
        pieces[letter_of(value)] = len(pieces)
    merges = [(word[0], word[1]) for word in WORDS.split()]
    pieces.update({left + right: len(pieces) + i for i, (left, right) in enumerate(merges)})
    assert len(pieces) == VOCAB
    tokenizer = Tokenizer(models.BPE(vocab=pieces, merges=merges))
    tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)
    if chat:
        wrapped.chat_template = TEMPLATE
    wrapped.save_pretrained(str(path))
    return wrapped


def letter_of(value: int) -> str:
    """The character that stands for this byte in a byte-level vocabulary."""
    printable = [*range(33, 127), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    if value in printable:
        return chr(value)
    others = [byte for byte in range(256) if byte not in printable]
    return chr(256 + others.index(value))


def settled(swarm: Any, expected: list[int]) -> bool:
    """Whether the servers free what they held; they do so when they hear of the end, soon."""
    deadline = time.monotonic() + 20
    while free_cache(swarm) != expected and time.monotonic() < deadline:
        time.sleep(0.05)
    return free_cache(swarm) == expected


@contextmanager
def api_server(model: Any, tokenizer: Any, *, running: int = 2, waiting: int = 4, **limits: int) -> Iterator[str]:
    """The real HTTP server in a thread; its base URL."""
    from bloombee_spec.api.app import make_app
    from bloombee_spec.api.job import Limits
    from bloombee_spec.api.server import ApiServer
    from bloombee_spec.api.service import Service
    from bloombee_spec.api.slots import Slots

    app = make_app(lambda: Service(model, tokenizer, "toy", Limits(**limits), Slots(running, waiting)))
    server = ApiServer(app, grace=1)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
        finally:
            server.should_exit = True
            thread.join(60)
            assert not thread.is_alive()
