"""What a server is asked to be. Checked once, on construction."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from mlxcel_paged.errors import InvalidFieldError
from mlxcel_paged.field_checks import check_count, check_range, check_seconds, check_switch, check_texts

MAX_SEQUENCES = 128
_KEY = re.compile(r"[!-~]{1,512}")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s]+")


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Settings of the HTTP server.

    Attributes:
        host: Address to bind. The default is reachable from this machine alone.
        port: TCP port; 0 takes a free one.
        served_model_name: Name in `/v1/models` and in answers; None takes the model's own.
        model_aliases: Further names that requests may use for the model.
        max_body_bytes: Largest request body; beyond it the answer is 413.
        max_messages: Messages in one chat request at most.
        max_prompts: Prompts in one `/v1/completions` request at most.
        max_choices: Answers to one prompt, `n`, at most.
        max_sequences: Prompts times `n` of one request at most.
        max_tools: Functions that one request may offer at most.
        max_stop_strings: Stop strings in one request at most.
        max_stop_characters: Characters in one stop string at most.
        max_open_sequences: Sequences being tokenized, waiting and running at most; beyond it the answer is 429.
        retry_after_s: Seconds that a client is told to wait after a 429 or 503.
        keepalive_interval_s: A stream without a new token for this long gets an SSE comment. Until the first
            token or the first comment no headers are sent, so that an early failure still has its status code.
        shutdown_timeout_s: Seconds that running requests get to finish after SIGTERM.
        api_keys: Keys of which requests must send one; none leaves the server open to whoever can reach it.
        open_metrics: Whether `/metrics` asks for no key.
        cors_origins: Origins whose pages may read answers, such as `https://example.org`, or `*` for all.
        debug_endpoints: Serve `/v1/debug/plan`.

    Raises:
        InvalidFieldError: A field is out of range or of another type.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    served_model_name: str | None = None
    model_aliases: tuple[str, ...] = ("default", "embedded")
    max_body_bytes: int = 4 << 20
    max_messages: int = 4096
    max_prompts: int = 64
    max_choices: int = 128
    max_sequences: int = MAX_SEQUENCES
    max_tools: int = 128
    max_stop_strings: int = 16
    max_stop_characters: int = 1024
    max_open_sequences: int = 1024
    retry_after_s: int = 1
    keepalive_interval_s: float = 15.0
    shutdown_timeout_s: int = 30
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    open_metrics: bool = False
    cors_origins: tuple[str, ...] = ()
    debug_endpoints: bool = False

    @property
    def is_exposed(self) -> bool:
        """Whether other machines may reach the server without a key."""
        return not self.api_keys and self.host not in ("localhost", "::1") and not self.host.startswith("127.")

    def __post_init__(self) -> None:
        if not self.host:
            expected = "an address, such as 127.0.0.1 for this machine alone or 0.0.0.0 for every network"
            raise InvalidFieldError("host", self.host, expected)
        check_range("port", self.port, 0, 65535)
        for name in ("open_metrics", "debug_endpoints"):
            check_switch(name, getattr(self, name))
        for name in ("model_aliases", "api_keys", "cors_origins"):
            check_texts(name, getattr(self, name))
        if self.served_model_name is not None and not self.served_model_name:
            raise InvalidFieldError("served_model_name", self.served_model_name, "a name of one character or more")
        if not all(_KEY.fullmatch(key) for key in self.api_keys):
            raise InvalidFieldError("api_keys", self.api_keys, "made of 1 to 512 visible ASCII characters", got="")
        for origin in self.cors_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                expected = "* or like https://example.org, without a path"
                raise InvalidFieldError("cors_origins", self.cors_origins, expected, got=repr(origin))
        for name in (
            "max_body_bytes",
            "max_messages",
            "max_prompts",
            "max_choices",
            "max_sequences",
            "max_tools",
            "max_stop_strings",
            "max_stop_characters",
            "max_open_sequences",
            "retry_after_s",
            "shutdown_timeout_s",
        ):
            check_count(name, getattr(self, name))
        check_seconds("keepalive_interval_s", self.keepalive_interval_s)
