"""What transformers computes for a tiny family: its logits, and how far they move.

Needs torch and transformers, which no test does.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from .families import Off, TinyFamily

Logits = list[np.ndarray]  # one [T, vocab] a prompt


class Oracle:
    """A tiny family in transformers: float32, eager attention, one thread; fails on any name that does not fit."""

    def __init__(self, tiny: TinyFamily, off: Off | None = None) -> None:
        self.tiny = tiny
        self.off = off or Off("nothing")
        family = getattr(transformers, tiny.config["architectures"][0])
        with tempfile.TemporaryDirectory() as directory:
            tiny.write(Path(directory), off)
            self.model, info = family.from_pretrained(
                directory,
                dtype=torch.float32,
                attn_implementation="eager",
                experts_implementation="eager",
                output_loading_info=True,
                **_dequantizing(tiny),
            )
        if off is None:
            wrong = {kind: sorted(map(str, names)) for kind, names in info.items() if names}
            if tiny.absent and "missing_keys" in wrong:
                wrong["missing_keys"] = [name for name in wrong["missing_keys"] if not re.search(tiny.absent, name)]
            if any(wrong.values()):
                raise SystemExit(f"{tiny.name}: names or shapes do not fit: {wrong}")

    @property
    def modeling(self) -> Any:
        """The module that the model's classes are of."""
        return sys.modules[type(self.model).__module__]

    @torch.inference_mode()
    def logits(self) -> Logits:
        """Logits of each prompt, float32."""
        with self._patched():
            return [self._run(ids) for ids in self.tiny.prompts()]

    def _run(self, ids: list[int]) -> np.ndarray:
        found: np.ndarray = self.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float().numpy()
        return found

    def logits_with_f16_kv(self) -> Logits:
        """Logits where attention is given keys and values that were rounded to float16."""

        def rounded(attend: Callable[..., Any]) -> Callable[..., Any]:
            def call(module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
                return attend(module, query, key.half().to(key.dtype), value.half().to(value.dtype), *args, **kwargs)

            return call

        with replaced(self.modeling, "eager_attention_forward", rounded(self.modeling.eager_attention_forward)):
            return self.logits()

    def logits_in_float64(self) -> Logits:
        """Logits computed in float64, as far as the model lets it."""
        self.model.double()
        try:
            return self.logits()
        finally:
            self.model.float()

    def router_gap(self) -> float:
        """The smallest difference of the last chosen and the first not chosen of all routers' scores.

        In units of the standard deviation of those scores; infinite without a router.
        """
        gaps = [float("inf")]
        topk = torch.topk

        def watched(scores: torch.Tensor, k: int, *args: Any, **kwargs: Any) -> Any:
            if scores.dim() == 2 and scores.shape[-1] > k and scores.is_floating_point():
                best = topk(scores, k + 1, dim=-1).values
                usable = scores[torch.isfinite(scores) & (scores > -1e30)]
                gaps.append(float((best[..., k - 1] - best[..., k]).min() / usable.std()))
            return topk(scores, k, *args, **kwargs)

        def watched_method(scores: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return watched(scores, *args, **kwargs)

        with replaced(torch, "topk", watched), replaced(torch.Tensor, "topk", watched_method):
            self.logits()
        return min(gaps)

    @contextmanager
    def _patched(self) -> Iterator[None]:
        """Without what `off` takes out of transformers' modules and functions."""
        hooks = []
        if self.off.modules:
            for name, module in self.model.named_modules():
                if re.search(self.off.modules, name):
                    hooks.append(module.register_forward_hook(lambda module, inputs, output: inputs[0]))
            if not hooks:
                raise SystemExit(f"{self.tiny.name}: no module is called {self.off.modules!r}")
        before = {}
        for name, family in self.off.functions.items():
            other = __import__(f"transformers.models.{family}.modeling_{family}", fromlist=[name])
            before[name] = getattr(self.modeling, name)
            setattr(self.modeling, name, getattr(other, name))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for name, function in before.items():
                setattr(self.modeling, name, function)


def _dequantizing(tiny: TinyFamily) -> dict[str, Any]:
    """What tells transformers to turn a quantized checkpoint into floats."""
    quantized = "quantization_config" in tiny.config
    return {"quantization_config": transformers.Mxfp4Config(dequantize=True)} if quantized else {}


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def distance(found: Logits, golden: Logits) -> float:
    """The largest difference over the standard deviation of the golden's logits, of all prompts."""
    return max(float(np.abs(a - b).max() / b.std()) for a, b in zip(found, golden, strict=True))


def quiet() -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
