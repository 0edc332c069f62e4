"""Record each request that an engine computes, with its reply: `serve --record`.

Knows requests in the engine's thread, and a file.
"""

from __future__ import annotations

import logging
import secrets
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ..chat.grammar import Grammar
from ..chat.token_constraint import ConstraintSource
from ..engine.completion import Completion, RequestOutput
from ..engine.generation_stream import Deliver
from ..engine.request import Request
from ..engine.sampling_params import SamplingParams
from ..kv_log.log import RotatingFile
from .recording import Computed, RecordedPrompt, RecordedRequest, WhyNot, digests_of, encoded, params_of

if TYPE_CHECKING:
    from ..engine.engine import Engine

_LOGGER = logging.getLogger(__name__)


class Recorder:
    """A recording of an engine's requests in a file; pass it to the engine as `recorder`, and close it afterwards.

    Requests with the match `off`, which cache nothing, are not recorded. If the file cannot be written, the
    recording ends and serving continues. A full file is renamed FILE.1, the earlier one FILE.2, and so on up to FILE.4;
    only their owner can read them.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: str | Path, max_bytes: int | None = None) -> None:
        self._file: RotatingFile | None = RotatingFile(path, max_bytes, is_private=True)
        self._computed: Computed | None = None

    def begin(self, engine: Engine, model: str) -> None:
        """Write the line that identifies the engine, with the model name for a replay; before the first request."""
        self._computed = computed = Computed.of(engine.manifest, model=model, context_length=engine.context_length)
        self._write(encoded(computed))

    def sampled_with(self, params: SamplingParams) -> SamplingParams:
        """Return the parameters with logprobs, and with a seed if the reply is sampled."""
        seed = params.seed if params.greedy or params.seed is not None else secrets.randbits(63)
        return replace(params, seed=seed, logprobs=params.logprobs or 0)

    def watch(self, request: Request, deliver: Deliver) -> Deliver:
        """Return a callback that records the reply when it ends. Its client gets logprobs only if it asked for them."""
        return partial(self._deliver, request, deliver)

    def close(self) -> None:
        """Close the recording; requests whose replies end later are not recorded."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _deliver(self, request: Request, deliver: Deliver, output: RequestOutput) -> None:
        """Deliver an output of a request, and record the request if its reply has ended.

        Logprobs that only the recording needs are removed.
        """
        if output.completion is not None and request.namespace is not None:
            self._write(encoded(recorded(request, output.completion)))
        if request.spec.params.logprobs is None and output.delta is not None and output.delta.logprobs is not None:
            output = output._replace(delta=replace(output.delta, logprobs=None))
        deliver(output)

    def _write(self, line: str) -> None:
        """Append a line to the recording; a full file is rotated first, and a new one begins with the engine's line.

        If the file cannot be written, the recording ends, and an error is logged.
        """
        if self._file is None:
            return
        try:
            if self._file.is_full:
                self._file.rotate()
                if self._computed is not None:
                    self._file.write(encoded(self._computed))
            self._file.write(line)
        except (OSError, ValueError) as error:
            _LOGGER.error("the recording ends here: %s", error)
            self._file = None


def recorded(request: Request, completion: Completion) -> RecordedRequest:
    """Return the recording line of a request whose reply has ended."""
    spec, reply, prompt = request.spec, request.reply, request.spec.prompt
    is_chat = spec.expects is not None
    grammar = _grammar_of(spec.options.constraint)
    return RecordedRequest(
        id=completion.request_id,
        prompt=RecordedPrompt(
            ids=completion.prompt_token_ids,
            text=prompt.text if is_chat else None,
            space_id=prompt.space_id,
            swallow_leading_space=prompt.swallow_leading_space,
            healed=prompt.healed,
        ),
        params=params_of(reply.sampler.params),
        is_chat=is_chat,
        grammar=grammar,
        why_not="adapter"
        if spec.options.lora is not None
        else _why_not(completion, is_known=grammar is not None or spec.options.constraint is None),
        reply_ids=completion.token_ids,
        logprobs=digests_of(reply.logprobs),
        finish_reason=completion.finish_reason,
    )


def _grammar_of(constraint: Grammar | ConstraintSource | None) -> Grammar | None:
    """Return the grammar of a request's constraint; None if it has none, or one that is no grammar."""
    found = constraint if isinstance(constraint, Grammar) else getattr(constraint, "grammar", None)
    return found if isinstance(found, Grammar) else None


def _why_not(completion: Completion, *, is_known: bool) -> WhyNot | None:
    """Return why a reply cannot be computed again, or None; `is_known` tells whether its constraint is known."""
    if completion.finish_reason == "cancelled":
        return "cancelled"
    if completion.usage.pruning is not None:
        return "approximate"
    return None if is_known else "constraint"
