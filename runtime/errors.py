"""Every error that radixlm raises on purpose, in one tree.

A message says what happened, the two values that disagree, and what to do. Catch `RadixLMError` for all of them.
`InvalidRequest` is the caller's mistake (HTTP 400, exit code 2), `EngineError` is the server's.
"""

from __future__ import annotations

from typing import Self


class RadixLMError(Exception):
    """Base class of every error raised on purpose."""


# Errors of model sources.


class SourceError(RadixLMError):
    """The model source cannot be used."""


class SourceNotFound(SourceError):
    """There is no such file, directory or repository, or it holds no model."""


class CorruptSource(SourceError):
    """The source is truncated, or contradicts itself."""


class UnsupportedArchitecture(SourceError):
    """The source's architecture is not in the registry; the message lists those that are."""


class UnsupportedTensor(SourceError):
    """A tensor has a storage type that no kernel supports."""


class UnsupportedTokenizer(SourceError):
    """The source's tokenizer has a type that cannot be rebuilt; the message lists the supported ones."""


class CompileError(RadixLMError):
    """Compiling failed for a reason other than the source."""


class VerificationFailed(CompileError):
    """The new artifact disagrees with the NumPy evaluation of the same weights; nothing was published."""


# Errors of artifacts.


class ArtifactError(RadixLMError):
    """The artifact cannot be used."""


class ArtifactNotFound(ArtifactError):
    """There is no artifact at this path."""


class CorruptArtifact(ArtifactError):
    """A file is missing, truncated, or not the one that the manifest describes."""


class UnsupportedArtifact(ArtifactError):
    """The artifact was written by another version of radixlm."""


class ArtifactBusy(ArtifactError):
    """The artifact is to be removed while a process has it open, or opened while it is being removed."""


class UnsupportedCPU(ArtifactError):
    """The artifact was compiled for CPU features that this machine does not have."""


# Errors of requests.


class InvalidRequest(RadixLMError, ValueError):
    """The request cannot be served as it is; the message names the value, and the values that are allowed."""


class InvalidParameter(InvalidRequest):
    """A parameter is outside its range; `param` is its name, if clients send it."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class InvalidArgument(InvalidParameter, TypeError):
    """An argument of the Python API is unknown or has the wrong type; `param` is its name."""


class InvalidAdapter(InvalidParameter):
    """A LoRA adapter is damaged, changes more than matrices, or does not fit the artifact."""


class ExtraNotInstalled(InvalidParameter):
    """A parameter belongs to a feature under `runtime/extras` that is not installed."""


class EmptyPrompt(InvalidRequest):
    """The prompt has no tokens."""


class ContextLengthExceeded(InvalidRequest):
    """Prompt and reply do not fit the model's context length.

    Attributes:
        num_tokens: tokens of the prompt, or a lower bound; None if unknown.
        most: the most tokens that a prompt can have; None if unknown.
    """

    num_tokens: int | None = None
    most: int | None = None

    @classmethod
    def of_prompt(cls, num_tokens: int, context_length: int, *, is_exact: bool = True, has_reply: bool = True) -> Self:
        """Return the error for a prompt of `num_tokens` tokens, or of at least as many unless `is_exact`.

        `has_reply` says that the context must have room for one token of a reply, too.
        """
        most, reply = context_length - has_reply, ", of which the reply needs one" if has_reply else ""
        error = cls(
            # begins like OpenAI's message, by which litellm recognizes the error
            f"This model's maximum context length is {context_length} tokens{reply}; the "
            f"prompt has {'' if is_exact else 'at least '}{num_tokens}: shorten it to {most}"
        )
        error.num_tokens, error.most = num_tokens, most
        return error


class InvalidGrammar(InvalidRequest):
    """A schema, regular expression or grammar is wrong or too complex; `line` is the line of the error, if known."""

    def __init__(self, message: str, *, line: int | None = None) -> None:
        super().__init__(message)
        self.line = line


class ConstraintFailed(InvalidRequest):
    """A reply cannot continue, because its grammar became too complex to follow, or allows no further token."""


# Errors of KV pages and sequences.


class KVError(RadixLMError):
    """An operation on pages or sequences was refused; nothing was changed."""


class OutOfPages(KVError):
    """The pool has too few free pages."""


class OutOfStates(OutOfPages):
    """The pool has no slot left for the state of a recurrent model."""


class PopLengthError(KVError):
    """A pop was requested of more tokens than the sequence has."""

    def __init__(self, length: int, pop: int) -> None:
        super().__init__(f"the sequence has {length} tokens, cannot pop {pop}; pop at most {length}")
        self.length = length
        self.pop = pop


class ForkLengthError(KVError):
    """A fork was requested beyond the end of the sequence."""

    def __init__(self, length: int, at: int) -> None:
        super().__init__(f"the sequence has {length} computed tokens, cannot fork at {at}; fork at 0..{length}")
        self.length = length
        self.at = at


class SparseForkError(ForkLengthError):
    """A fork was requested at a token where only some of the tokens have KV."""

    def __init__(self, start: int, stop: int, at: int) -> None:
        KVError.__init__(
            self,
            f"only some of the tokens {start} to {stop} of the sequence have KV, cannot fork at {at}; fork at "
            f"0..{start}, or at {stop} or after it",
        )
        self.length = stop
        self.at = at


class AppendLengthError(KVError):
    """An append would exceed the context length."""

    def __init__(self, length: int, append: int, context_length: int) -> None:
        super().__init__(
            f"the sequence has {length} tokens, {append} more pass the context length of {context_length}; "
            f"append at most {context_length - length}"
        )
        self.length = length
        self.append = append
        self.context_length = context_length


class UnknownSequence(KVError):
    """No sequence has this id."""


class SparseSpanError(KVError):
    """A sparse span is inconsistent, belongs to another prompt, or follows pages that are no longer cached."""


class KVLogBroken(RadixLMError):
    """A line of a KV log contradicts those before it; the message has its number."""


class RecordingUnusable(RadixLMError):
    """A file is not a recording of requests; the message has the number of the line."""


# Errors of the disk store.


class StoreError(RadixLMError):
    """A directory of stored pages, or a bundle of them, cannot be used."""


class StoreBusy(StoreError):
    """Another process has this directory open."""


class StoreCorrupt(StoreError):
    """The content of the store is not what was written."""


class StoreUnusable(StoreCorrupt):
    """The disk is full, read-only or broken, or another user owns the directory, so that nothing can be stored."""


class StoreMismatch(StoreError):
    """The pages belong to another model, or to another version of radixlm."""


class StoreOff(StoreError):
    """The disk failed or hangs: its content stays there until a process opens it again."""


# Models of a server that loads them on demand.


class ModelUnavailable(RadixLMError):
    """A model is not loaded, and was not loaded for a request."""


class ModelTooLarge(ModelUnavailable):
    """A model does not fit into the memory that a server may use, with the models that stay loaded."""


class ModelFailed(ModelUnavailable):
    """A model could not be loaded, or its process ended unexpectedly."""


# Errors of the engine.


class EngineError(RadixLMError):
    """The engine could not do its work."""


class StepFailed(EngineError):
    """A step failed; its requests fail with it, and the engine continues."""


class EngineClosed(EngineError):
    """The engine was closed."""


class EngineDied(EngineError):
    """The engine's thread died of `cause`, and its requests failed. If `is_final`, later requests are refused, too."""

    def __init__(self, cause: BaseException, *, is_final: bool) -> None:
        lost = "it was started again with an empty cache; send the request again, unless it is what killed the engine"
        super().__init__(f"the engine died of {type(cause).__name__}: {cause}; {'open it again' if is_final else lost}")
        self.__cause__ = cause
        self.is_final = is_final


class EngineOverloaded(EngineError):
    """The engine's queue is full; the request was not processed."""

    def __init__(self, num_requests: int, max_num_requests: int, retry_after_s: int) -> None:
        super().__init__(
            f"the engine has {num_requests} requests, at most {max_num_requests} may run and wait; send it again in "
            f"{retry_after_s} s, or raise --max-queue"
        )
        self.retry_after_s = retry_after_s


class WorkOverloaded(EngineOverloaded):
    """Too many requests wait for work outside of the engine, such as tokenizing; this one was not processed."""

    def __init__(self, work: str, num_waiting: int, retry_after_s: int) -> None:
        EngineError.__init__(
            self,
            f"{num_waiting} requests wait for {work}, as many as may; send it again in {retry_after_s} s, or raise "
            f"--max-queue",
        )
        self.retry_after_s = retry_after_s


class GrammarsOverloaded(EngineOverloaded):
    """Too many grammars wait to be tried, or the machine is too busy; this one was not tried."""

    def __init__(self, num_waiting: int, retry_after_s: int) -> None:
        EngineError.__init__(
            self,
            f"the grammar could not be tried in time, {num_waiting} others wait; send it again in {retry_after_s} s",
        )
        self.retry_after_s = retry_after_s
