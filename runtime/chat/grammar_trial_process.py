"""Try grammars in processes that may die: a program for `grammar_trial.py`, over its standard input and output.

A hostile schema takes the compiler minutes, all memory or more stack than there is, and the last of these kills the
process. So each grammar is tried in a fork that is limited in all three. A fork of a process that already has the
vocabulary costs milliseconds. Imports nothing of ours but `system`, so that it starts at once.

Reads a line of JSON with the vocabulary, then a line for each grammar; answers each with a line. Its argument is the
niceness with which it reads the first line, 0 if a request waits for it.
"""

from __future__ import annotations

import base64
import ctypes
import json
import os
import resource
import select
import signal
import sys
import threading
from typing import Any, cast

import llguidance

from ..system import give_way, limit_address_space, process_memory_bytes, trim_heap

LOWEST = 19  # priority, as a niceness
MAX_MEMORY_BYTES = 512 << 20  # beyond the memory of the vocabulary
_MEMORY_LOOK_MS = 20  # between two checks of a trial's memory, on systems without a memory limit
# The main program has stacks of 8 MiB or, without a limit on stacks, 2: what passes here fits there.
STACK_BYTES = 1 << 20
_EMPTY = 'start: ""'
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,24}"  # an endless run of blanks is valid JSON, and small models write it


def main() -> None:
    """Try each grammar that standard input has as a line of JSON, and print the answer, until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent process
    threading.stack_size(STACK_BYTES)
    opened: list[tuple[dict[str, Any], Any, Any]] = []
    # a thread has its own priority, and a process cannot raise its priority again
    thread = threading.Thread(target=lambda: opened.append(_open(niceness=int(sys.argv[1]))))
    thread.start()
    thread.join()
    hello, tokenizer, limits = opened[0]
    os.nice(hello["niceness"])
    _say({})
    for line in sys.stdin.buffer:
        _say(_try_in_fork(tokenizer, limits, json.loads(line), hello["time_limit_s"]))


def _open(*, niceness: int) -> tuple[dict[str, Any], Any, Any]:
    """Read the first line, and build what trials share, with this thread's priority lowered."""
    give_way(niceness)
    hello = json.loads(sys.stdin.buffer.readline())
    vocabulary = TokenBytes.unpacked(hello)
    wrapper = cast(llguidance.TokenizerWrapper, vocabulary)
    # without slices: they take 30 MB for 150,000 tokens, and the one mask of a trial is as fast
    tokenizer = llguidance.LLTokenizer(wrapper, eos_token=hello["eos_token_ids"], slices=[])
    limits = limits_of(hello["limits"])
    _try(tokenizer, limits, {"kind": "regex", "text": "(.|\\n)*", "is_strict": True})  # builds what all trials share
    vocabulary.drop_bytes()
    kept = {"time_limit_s": hello["time_limit_s"], "niceness": hello["niceness"]}
    hello.clear()
    trim_heap()
    return kept, tokenizer, limits


def limits_of(limits: dict[str, int]) -> llguidance.LLParserLimits:
    """Return the library's limits on the work of a grammar; they hold while it is tried and in replies."""
    return llguidance.LLParserLimits(
        step_lexer_fuel=limits["step_lexer_fuel"], max_lexer_states=limits["max_lexer_states"], verbose_errors=False
    )


class TokenBytes:
    """The bytes of all tokens, in the form that `LLTokenizer` expects."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: list[bytes], special_token_ids: list[int], eos_token_id: int) -> None:
        self.tokens = tokens
        self.special_token_ids = special_token_ids
        self.eos_token_id = eos_token_id
        self._id_of_byte = {token[0]: i for i, token in enumerate(tokens) if len(token) == 1}

    @classmethod
    def unpacked(cls, packed: dict[str, Any]) -> TokenBytes:
        """Return the vocabulary from the JSON form that `packed` makes."""
        text, at, tokens = base64.b64decode(packed["bytes"]), 0, []
        for length in packed["lengths"]:
            tokens.append(text[at : at + length])
            at += length
        return cls(tokens, packed["special_token_ids"], packed["eos_token_ids"][0])

    def packed(self) -> dict[str, Any]:
        """Return the vocabulary in a form for JSON."""
        text = base64.b64encode(b"".join(self.tokens)).decode()
        return {"bytes": text, "lengths": [*map(len, self.tokens)], "special_token_ids": self.special_token_ids}

    def drop_bytes(self) -> None:
        """Drop the bytes of tokens, because the `LLTokenizer` made from them has a copy: 14 MB for 150,000."""
        self.tokens = []

    def __call__(self, text: str) -> list[int]:
        """Return ids that spell a text, byte by byte."""
        return [self._id_of_byte[byte] for byte in text.encode() if byte in self._id_of_byte]


def _try_in_fork(tokenizer: Any, limits: Any, wish: dict[str, Any], time_limit_s: float) -> dict[str, str]:
    """Try a grammar in a fork with limits on time and memory.

    Returns:
        `grammar` in the library's form; `error`, why it is invalid or too large; or `late`: `slow` if it took too much
            CPU time, `busy` if the machine gave it too little.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        signal.setitimer(signal.ITIMER_PROF, time_limit_s)  # both signals kill: this one blames the grammar,
        signal.setitimer(signal.ITIMER_REAL, wish["real_limit_s"])  # and this one a busy machine
        limit_address_space(MAX_MEMORY_BYTES)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        answers: list[dict[str, str]] = []
        thread = threading.Thread(target=lambda: answers.append(_try(tokenizer, limits, wish)))
        thread.start()
        thread.join()
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(json.dumps(answers[0]).encode() if answers else b"")
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        _watch_memory(child, reading, (process_memory_bytes(os.getpid()) or 0) + MAX_MEMORY_BYTES)
        answer = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFEXITED(status) and answer:
        result: dict[str, str] = json.loads(answer)
        return result
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGPROF, signal.SIGALRM):
        return {"late": "busy" if os.WTERMSIG(status) == signal.SIGALRM else "slow"}
    return {"error": "it is too deep, or takes too much memory"}


def _watch_memory(child: int, reading: int, limit_bytes: int) -> None:
    """Wait until the child answers into the pipe or ends; kill it if it takes more than `limit_bytes`."""
    poll = select.poll()
    poll.register(reading, select.POLLIN)
    while not poll.poll(_MEMORY_LOOK_MS):
        if (process_memory_bytes(child) or 0) > limit_bytes:
            os.kill(child, signal.SIGKILL)
            return


def _try(tokenizer: Any, limits: Any, wish: dict[str, Any]) -> dict[str, str]:
    """Return `grammar`, the grammar in the library's form, or `error`: why it is invalid, or allows no token."""
    try:
        grammar = _grammar(wish["kind"], wish["text"], is_strict=wish["is_strict"])
    except Exception as error:
        return {"error": f"{error}"}
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    mask = b"" if matcher.is_error() else _mask(matcher, tokenizer.vocab_size)
    if not matcher.is_error() and any(mask):
        return {"grammar": grammar}
    if "NoExtensionBias" in matcher.get_error() or not matcher.is_error():
        return {"error": "there is no text that it describes"}
    return {"error": matcher.get_error()}


def _grammar(kind: str, text: str, *, is_strict: bool) -> str:
    """Return a client's grammar of this kind in the library's form."""
    matcher = llguidance.LLMatcher
    match kind:
        case "json_schema":
            options = {"lenient": not is_strict, "coerce_one_of": not is_strict, "whitespace_pattern": WHITESPACE}
            return matcher.grammar_from_json_schema(text, overrides=options)  # type: ignore[arg-type]
        case "regex":
            # digits are ASCII, as in JSON and vLLM, not those of all scripts
            return matcher.grammar_from_lark(f"start: /{llguidance.regex_to_lark(text, 'd')}/") if text else _EMPTY
        case "choice":
            return matcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, json.loads(text))))
        case "grammar":
            return llguidance.grammar_from("grammar", text)
        case _:
            return matcher.grammar_from_lark(text)


def _mask(matcher: Any, vocab_size: int) -> bytes:
    """Return the bits of the tokens that may begin a reply."""
    mask = ctypes.create_string_buffer(-(-vocab_size // 32) * 4)
    matcher.unsafe_compute_mask_ptr(ctypes.addressof(mask), len(mask))
    return mask.raw


def _say(answer: dict[str, str]) -> None:
    sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
