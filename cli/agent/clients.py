"""The table of coding agents: the settings file that each needs to use this server, and how it is run with that file.

Knows neither servers nor commands. The files have none of the user's settings: each agent reads such a file in addition
to the user's own.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Template

from radixlm.runtime.system import replaced

NO_KEY = "none"  # sent to a server without keys, because agents refuse to send none
_COMPACT_SHARE = 0.85  # share of the context at which Codex compacts a conversation
_NAME = re.compile(r"(?<!\$)\$[a-z_]+")  # a value's name in a template
_VALUE = r'(?:"(?:[^"\\]|\\.)*"|\d+)'  # a string or a number in JSON
_WAIT_S = 3600  # for a reply: 20,000 tokens may take minutes


@dataclass(frozen=True)
class Served:
    """A model of a server, with everything that agents need to use it.

    Args:
        url: URL without a path, `http://127.0.0.1:8000`.
        model: the model's name for clients.
        context_length: maximum tokens of prompt and reply together.
    """

    url: str
    model: str
    context_length: int
    api_key: str | None = None

    def values(self) -> dict[str, str]:
        """Return the values for templates, as JSON, which is also valid in TOML and YAML."""
        values: dict[str, object] = {
            "url": self.url,
            "openai_url": f"{self.url}/v1",
            "model": self.model,
            "qualified_model": f"radixlm/{self.model}",
            "aider_model": f"openai/{self.model}",
            "api_key": self.api_key or NO_KEY,
            "context_length": self.context_length,
            "context_length_text": str(self.context_length),
            "compact_at": int(self.context_length * _COMPACT_SHARE),
            "quarter": max(1, self.context_length // 4),
            "wait_s": _WAIT_S,
            "wait_ms": _WAIT_S * 1000,
            "wait_ms_text": str(_WAIT_S * 1000),
        }
        return {name: json.dumps(value, ensure_ascii=False) for name, value in values.items()}


@dataclass(frozen=True)
class Client:
    """One coding agent.

    Args:
        home_variable: environment variable with the folder of the agent's files.
        home: that folder if the variable is not set, relative to the user's home.
        file: path of the settings file in that folder.
        template: text of the file, with the names of `Served.values`.
        install: command line that installs it.
        run: command line that starts the agent; `{file}` is the file's path.
        min_context: minimum context in tokens.
        note: explanation of a harmless warning that the agent prints; may be empty.
    """

    name: str
    home_variable: str
    home: str
    file: str
    template: str
    run: str
    install: str
    min_context: int
    note: str = ""

    def path(self, environment: Mapping[str, str], user_home: Path) -> Path:
        """Return the path of the settings file.

        >>> CLIENTS["codex"].path({"CODEX_HOME": "/codex"}, Path("/home/me"))
        PosixPath('/codex/radixlm.config.toml')
        """
        home = environment.get(self.home_variable)
        return (Path(home) if home else user_home / self.home) / self.file

    def check_installed(self) -> None:
        """Raise ValueError if the agent's command is not on the PATH."""
        if shutil.which(self.name) is None:
            raise ValueError(f"{self.name} is not installed; install it: {self.install}")

    def text(self, served: Served) -> str:
        """Return the text of the settings file."""
        return Template(self.template).substitute(served.values())

    def has_written(self, text: str) -> bool:
        """Return whether `text` is an unchanged settings file, for this or another server.

        >>> CLIENTS["aider"].has_written(CLIENTS["aider"].text(Served("http://other:1", "other", 4096, "sk-other")))
        True
        >>> CLIENTS["aider"].has_written("model: mine")
        False
        """
        between = [re.escape(part.replace("$$", "$")) for part in _NAME.split(self.template)]
        return re.fullmatch(_VALUE.join(between), text) is not None


_CODEX = """\
model = $model
model_provider = "radixlm"
model_context_window = $context_length
model_auto_compact_token_limit = $compact_at
check_for_update_on_startup = false

[analytics]
enabled = false

[features]
plugins = false

[model_providers.radixlm]
name = "radixlm"
base_url = $openai_url
wire_api = "responses"
experimental_bearer_token = $api_key
stream_idle_timeout_ms = $wait_ms
"""

_OPENCODE = """\
{
  "$$schema": "https://opencode.ai/config.json",
  "model": $qualified_model,
  "small_model": $qualified_model,
  "autoupdate": false,
  "share": "disabled",
  "provider": {
    "radixlm": {
      "npm": "@ai-sdk/openai-compatible",
      "name": "radixlm",
      "options": {"baseURL": $openai_url, "apiKey": $api_key, "timeout": $wait_ms},
      "models": {$model: {"name": $model, "limit": {"context": $context_length, "output": $quarter}}}
    }
  }
}
"""

_CLAUDE = """\
{
  "env": {
    "ANTHROPIC_BASE_URL": $url,
    "ANTHROPIC_AUTH_TOKEN": $api_key,
    "ANTHROPIC_MODEL": $model,
    "ANTHROPIC_DEFAULT_HAIKU_MODEL": $model,
    "ANTHROPIC_DEFAULT_SONNET_MODEL": $model,
    "ANTHROPIC_DEFAULT_OPUS_MODEL": $model,
    "CLAUDE_CODE_SUBAGENT_MODEL": $model,
    "CLAUDE_CODE_MAX_CONTEXT_TOKENS": $context_length_text,
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "API_TIMEOUT_MS": $wait_ms_text
  }
}
"""

_AIDER = """\
model: $aider_model
openai-api-base: $openai_url
openai-api-key: $api_key
timeout: $wait_s
max-chat-history-tokens: $quarter
show-model-warnings: false
check-update: false
show-release-notes: false
analytics-disable: true
"""

CLIENTS = {
    client.name: client
    for client in (
        Client(
            "codex",
            "CODEX_HOME",
            ".codex",
            "radixlm.config.toml",
            _CODEX,
            "codex --profile radixlm",
            "npm install -g @openai/codex",
            min_context=16_000,
            note="Codex warns that it has no metadata of the model; it uses the context length of this file",
        ),
        Client(
            "opencode",
            "XDG_CONFIG_HOME",
            ".config",
            "opencode/radixlm.json",
            _OPENCODE,
            "OPENCODE_CONFIG={file} OPENCODE_DISABLE_MODELS_FETCH=1 opencode",
            "npm install -g opencode-ai",
            min_context=16_000,
        ),
        Client(
            "claude",
            "CLAUDE_CONFIG_DIR",
            ".claude",
            "radixlm.json",
            _CLAUDE,
            "claude --settings {file}",
            "npm install -g @anthropic-ai/claude-code",
            min_context=32_000,
        ),
        Client(
            "aider",
            "",
            ".",
            ".aider.radixlm.yml",
            _AIDER,
            "aider --config {file}",
            "pip install aider-chat",
            min_context=8_000,
        ),
    )
}


def write_file(path: Path, text: str, is_replaceable: Callable[[str], bool]) -> Path | None:
    """Write `text` to a file that only its owner can read, because it may contain an API key.

    A file with another text is renamed to the first free name of `NAME.bak`, `NAME.bak.1` and so on.

    Args:
        is_replaceable: tells if a text can be overwritten without a backup.

    Returns:
        The backup, or None if none was needed.

    Raises:
        OSError: the file cannot be written. Nothing was changed.
    """
    before = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else None
    if before == text:
        return None
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced(path, mode=0o600) as file:
        file.write(text.encode())
        file.flush()  # a full disk leaves no backup
        is_kept = path.exists() and not (before is not None and is_replaceable(before))
        return _backup(path) if is_kept else None


def _backup(path: Path) -> Path:
    """Link a file to the first free backup name, and return that."""
    number = 0
    while True:
        backup = path.with_name(f"{path.name}.bak.{number}" if number else f"{path.name}.bak")
        try:
            os.link(path, backup)
            return backup
        except FileExistsError:
            number += 1
