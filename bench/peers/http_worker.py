"""An engine behind HTTP, as it is measured: its server in a process of its own, and clients of it in this one.

    python -m bench.peers.http_worker radixlm radixlm serve ARTIFACT
    python -m bench.peers.http_worker llama.cpp llama-server --model GGUF --parallel 8 --ctx-size 1024

Prompts are token ids, replies greedy and as long as is asked for. Streams and first tokens are timed by the client, and
so are both engines' alike; prefill and decode of llama.cpp by its own clock, which leaves HTTP and its parsing out.
"""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from ..served import Client, Event, Json, ServedProcess
from ..timing import steady_tokens_per_s
from ..worker import serve

Ids = Sequence[int]


class Engine(ABC):
    """The measurements that all servers have; subclasses say how a server is asked and what its events mean."""

    path: str
    streaming: Json  # what makes a request one for a stream

    def __init__(self, server: ServedProcess) -> None:
        self._server = server
        self._clients: list[Client] = []  # one for each stream, kept from one measurement to the next

    @abstractmethod
    def body(self, prompt: Ids, num_tokens: int) -> Json:
        """A request for a whole reply."""

    @abstractmethod
    def arrivals(self, events: Sequence[Event]) -> list[float]:
        """When each token of a reply came, by the client's clock."""

    @abstractmethod
    def num_cached(self, last: Event) -> int:
        """How many tokens of the prompt came from the cache."""

    def streams(self, prompts: Sequence[Ids], num_tokens: int) -> float:
        """Tokens a second of all prompts together, while all decode."""

        def ask(client: Client, prompt: Ids) -> list[Event]:
            return client.events(self.path, {**self.body(prompt, num_tokens), **self.streaming})

        with ThreadPoolExecutor(len(prompts)) as threads:
            replies = list(threads.map(ask, self._clients_for(len(prompts)), prompts))
        times = [self.arrivals(events) for events in replies]
        lengths = {len(mine) for mine in times}
        if lengths != {num_tokens}:
            raise ValueError(f"replies have {sorted(lengths)} tokens, {num_tokens} were asked for")
        return steady_tokens_per_s(times)

    def resume(self, prefix: Ids, suffix: Ids) -> float:
        """Seconds to the first token of `prefix + suffix`, when `prefix` was a prompt just before."""
        [client] = self._clients_for(1)
        client.json("POST", self.path, self.body(prefix, 1))
        start = time.perf_counter()
        events = client.events(self.path, {**self.body([*prefix, *suffix], 2), **self.streaming})
        if (cached := self.num_cached(events[-1])) < len(prefix):
            raise ValueError(f"{cached} tokens came from the cache, {len(prefix)} should have")
        return self.arrivals(events)[0] - start

    def pid(self) -> int:
        """Of the server, whose memory others may look at."""
        return self._server.pid

    def _clients_for(self, count: int) -> list[Client]:
        self._clients += [Client(self._server.port) for _ in range(count - len(self._clients))]
        return self._clients[:count]


class RadixLM(Engine):
    """`radixlm serve`."""

    path = "/v1/completions"
    streaming = {"stream": True, "stream_options": {"include_usage": True}}  # noqa: RUF012

    def body(self, prompt: Ids, num_tokens: int) -> Json:
        """See `Engine`."""
        fixed = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
        return {"prompt": list(prompt), "max_tokens": num_tokens, **fixed}

    def arrivals(self, events: Sequence[Event]) -> list[float]:
        """See `Engine`."""
        counts = [sum(len(choice.get("token_ids", ())) for choice in event.data["choices"]) for event in events]
        return [event.at for event, count in zip(events, counts, strict=True) for _ in range(count)]

    def num_cached(self, last: Event) -> int:
        """See `Engine`."""
        return int(last.data["usage"]["prompt_tokens_details"]["cached_tokens"])


class LlamaCpp(Engine):
    """`llama-server`."""

    path = "/completion"
    streaming = {"stream": True}  # noqa: RUF012

    def body(self, prompt: Ids, num_tokens: int) -> Json:
        """See `Engine`."""
        fixed = {"temperature": 0, "samplers": ["temperature"], "ignore_eos": True}
        return {"prompt": list(prompt), "n_predict": num_tokens, **fixed}

    def arrivals(self, events: Sequence[Event]) -> list[float]:
        """See `Engine`. A token that ends within a character has no event: it counts with the next one."""
        times: list[float] = []
        for event in events:
            times += [event.at] * (int(event.data["tokens_predicted"]) - len(times))
        return times

    def num_cached(self, last: Event) -> int:
        """See `Engine`."""
        return int(last.data["timings"]["cache_n"])

    def prefill(self, prompt: Ids) -> float:
        """Seconds of the prompt."""
        timings = self._timings(prompt, 1)
        assert timings["prompt_n"] == len(prompt), timings
        return float(timings["prompt_ms"]) / 1e3

    def decode(self, prompt: Ids, num_tokens: int) -> float:
        """Tokens a second after the first; the clock starts when that is there."""
        timings = self._timings(prompt, num_tokens)
        assert timings["predicted_n"] == num_tokens, timings
        return (num_tokens - 1) / float(timings["predicted_ms"]) * 1e3

    def _timings(self, prompt: Ids, num_tokens: int) -> Json:
        [client] = self._clients_for(1)
        answer = client.json("POST", self.path, {**self.body(prompt, num_tokens), "cache_prompt": False})
        timings: Json = answer["timings"]
        return timings


_ENGINES: dict[str, type[Engine]] = {"radixlm": RadixLM, "llama.cpp": LlamaCpp}
_METHODS = ("streams", "resume", "pid", "prefill", "decode")


def main() -> None:
    """Serve until standard input ends."""
    kind, *command = sys.argv[1:]
    with ServedProcess(command) as server:
        engine = _ENGINES[kind](server)
        serve({name: getattr(engine, name) for name in _METHODS if hasattr(engine, name)})


if __name__ == "__main__":
    main()
