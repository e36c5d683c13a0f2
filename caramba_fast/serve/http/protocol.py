"""Bodies of the OpenAI API, as far as they are served: https://platform.openai.com/docs/api-reference.

Fields that would change an answer and are not served are rejected by name; fields that only describe the caller are
ignored. ``top_k``, ``min_p``, ``repetition_penalty``, ``ignore_eos`` and ``cache_salt`` are vLLM's additions.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from types import NoneType
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictInt, field_validator, model_validator

from caramba_fast.config.files import shown
from caramba_fast.config.names import check_truth_values
from caramba_fast.infer.fields import GREEDY_BELOW
from caramba_fast.serve.http.logprobs import LogprobsWriter
from caramba_fast.serve.request import Event, RequestOutput

#: Most answers to one prompt, and most stop strings.
MOST_ANSWERS, MOST_STOPS = 128, 16
#: Finish reasons -> OpenAI's.
FINISHED = {"eos": "stop", "stop": "stop", "length": "length", "time": "length"}
#: Fields of `GenerateConfig` -> their names in a body, where they differ.
BODY_NAMES = {
    "num_return_sequences": ("n",), "min_new_tokens": ("min_tokens",), "stop": ("stop", "stop_token_ids"),
    "logprobs": ("logprobs", "top_logprobs"), "structured_outputs": ("response_format",),
}  # fmt: skip
#: Tokens of a completion that names no limit, as in OpenAI's API.
COMPLETION_TOKENS = 16
Text = Annotated[str, Field(min_length=1)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _null_is_not_given(cls, body: Any) -> Any:
        """Fields that are null get their default, as in OpenAI's API."""
        if not isinstance(body, dict):
            return body
        check_truth_values(cls, body)
        return {
            name: value
            for name, value in body.items()
            if value is not None or name not in cls.model_fields
        }


class StreamOptions(_Body):
    """Options of a stream; padding against listeners (``include_obfuscation``) has no effect, as events have none."""

    include_usage: bool = False
    include_obfuscation: bool | None = None


class JsonSchema(_Body):
    """The schema of an answer; answers always match it, so ``strict`` has no effect."""

    name: Text
    json_schema: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(_Body):
    """The format of an answer: text, any JSON object, or JSON that matches a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _schema_where_it_belongs(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("type is 'json_schema' where a json_schema is given, and only there")
        return self

    @property
    def structured_outputs(self) -> dict[str, Any] | None:
        """The value of that field of `GenerateConfig`."""
        if self.json_schema is not None:
            return {"json_schema": self.json_schema.json_schema}
        return {"json_object": True} if self.type == "json_object" else None


class Sampling(_Body):
    """Fields of both chat and text completions."""

    model: str | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float = Field(default=1.0, ge=0, le=2)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    min_p: float | None = Field(default=None, ge=0, le=1)
    n: int = Field(default=1, ge=1, le=MOST_ANSWERS)
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    stop: Annotated[list[Text], Field(max_length=MOST_STOPS)] | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=MOST_STOPS)] = []
    min_tokens: int = Field(default=0, ge=0)
    stream: bool = False
    stream_options: StreamOptions | None = None
    presence_penalty: float = Field(default=0, ge=-2, le=2)
    frequency_penalty: float = Field(default=0, ge=-2, le=2)
    repetition_penalty: float = Field(default=1.0, ge=1e-3, le=1e3)  # beyond, scores overflow
    logit_bias: dict[int, Annotated[float, Field(ge=-100, le=100)]] | None = None
    ignore_eos: bool = False
    response_format: ResponseFormat | None = None
    cache_salt: Text | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop_or_several(cls, stop: Any) -> Any:
        """A single stop string is a list of one."""
        if not isinstance(stop, (str, list)):
            raise ValueError(f"it is {shown(stop)}; text, or a list of texts, is served")
        return [stop] if isinstance(stop, str) else stop

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> Sampling:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is given and stream is not true")
        return self

    @model_validator(mode="after")
    def _greedy_answers_are_one(self) -> Sampling:
        if self.n > 1 and self.temperature < GREEDY_BELOW:
            raise ValueError(
                f"n is {self.n} and temperature {self.temperature:g}: all would be alike; 1 is allowed"
            )
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return tuple(self.stop or ())

    @property
    def usage_in_stream(self) -> bool:
        """Whether the last event of a stream has the token counts."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def wanted_logprobs(self) -> int | None:
        """How many most likely tokens to return with each token; None for no log-probabilities."""
        return None

    def settings(self, max_new_tokens: int) -> dict[str, Any]:
        """The settings given in the body, as fields of `GenerateConfig`; others are left to the engine's defaults."""
        answer_format = self.response_format and self.response_format.structured_outputs
        top_k = None if self.top_k in (None, -1, 0) else self.top_k
        given: dict[str, Any] = dict(
            max_new_tokens=max_new_tokens, temperature=self.temperature, top_k=top_k, min_p=self.min_p,
            top_p=None if self.top_p == 1 else self.top_p, seed=self.seed, num_return_sequences=self.n,
            presence_penalty=self.presence_penalty, frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty, logit_bias=self.logit_bias or None,
            stop=(*self.stops, *self.stop_token_ids), min_new_tokens=self.min_tokens, ignore_eos=self.ignore_eos,
            logprobs=self.wanted_logprobs, structured_outputs=answer_format,
        )  # fmt: skip
        said = self.model_fields_set | {"max_new_tokens"}
        for name, fields in BODY_NAMES.items():
            said |= {name} if said.intersection(fields) else set()
        if "temperature" in said:  # it decides whether tokens are sampled
            given["do_sample"] = None
            said |= {"do_sample"}
        return {name: value for name, value in given.items() if name in said}


class CompletionRequest(Sampling):
    """A body of ``/v1/completions``."""

    prompt: Text | Annotated[list[StrictInt], Field(min_length=1)]
    echo: Literal[False] = False
    best_of: None = None
    suffix: None = None
    logprobs: int | None = Field(default=None, ge=0)

    @field_validator("prompt", mode="before")
    @classmethod
    def _one_prompt(cls, prompt: Any) -> Any:
        """The prompt may be the only entry of a list."""
        if not isinstance(prompt, list) or not any(isinstance(x, (str, list)) for x in prompt):
            return prompt
        if len(prompt) > 1:
            raise ValueError(f"{len(prompt)} prompts are in one body; 1 is served")
        return prompt[0]

    @field_validator("best_of", mode="before")
    @classmethod
    def _the_best_of_one(cls, value: Any) -> Any:
        """1 is OpenAI's default, which clients send: it asks for nothing."""
        return None if type(value) is int and value == 1 else value

    @property
    def wanted_logprobs(self) -> int | None:
        """As in `Sampling`."""
        return self.logprobs


class TextPart(_Body):
    """A text part of a message."""

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """A message of a chat; further fields (``tool_calls``, ``name``) are passed to the chat template.

    Arguments of tool calls are parsed, since clients send a JSON string and most templates write JSON.
    """

    model_config = ConfigDict(extra="allow")
    role: Text
    content: str | list[TextPart] | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _text_alone(cls, content: Any) -> Any:
        if not isinstance(content, (str, list, NoneType)):
            raise ValueError(f"it is {shown(content)}; text, or a list of text parts, is served")
        for part in content if isinstance(content, list) else ():
            kind = part.get("type") if isinstance(part, dict) else "text"
            if kind not in (None, "text"):
                raise ValueError(f"a part has the type {shown(kind)}; 'text' is served")
            if not isinstance(part, dict) or not isinstance(part.get("text"), str):
                raise ValueError(
                    f"a part is {shown(part)}; an object with the type 'text' and a text is served"
                )
        return content

    def laid_out(self, parsed: bool = True) -> dict[str, Any]:
        """The message for a template: text parts joined, and call arguments ``parsed`` if they are JSON.

        A message without content, as one that only calls tools, has an empty one: transformers removes None, and many
        templates read the content of every message.
        """
        found = {"content": "", **self.model_dump(exclude_none=True)}
        if isinstance(self.content, list):
            found["content"] = "".join(part.text for part in self.content)
        calls = found.get("tool_calls") if parsed else None
        for call in calls if isinstance(calls, list) else ():
            function = call.get("function") if isinstance(call, dict) else None
            if isinstance(function, dict) and isinstance(function.get("arguments"), str):
                with suppress(ValueError, RecursionError):  # other text is kept as it is
                    function["arguments"] = json.loads(function["arguments"])
        return found


class ChatRequest(Sampling):
    """A body of ``/v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: int | None = Field(default=None, ge=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0)

    @model_validator(mode="after")
    def _top_logprobs_need_logprobs(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs is given and logprobs is not true")
        return self

    @property
    def wanted_logprobs(self) -> int | None:
        """As in `Sampling`."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def given_tools(self) -> list[dict[str, Any]] | None:
        """The tools for the chat template."""
        return None if self.tool_choice == "none" else self.tools


class TokenizeRequest(_Body):
    """A body of ``/tokenize``: text, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _one_of_them(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("one of prompt and messages is needed")
        return self


class Answer:
    """The ids, time and format of one response; ``chat`` selects that of chats or of completions."""

    def __init__(self, model: str, chat: bool, logprobs: LogprobsWriter) -> None:
        self.model, self.chat, self.logprobs = model, chat, logprobs
        self.id = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self._begun: set[int] = set()

    def _head(self, streamed: bool) -> dict[str, Any]:
        kind = "text_completion"
        if self.chat:
            kind = "chat.completion.chunk" if streamed else "chat.completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def chunk(self, index: int, text: str, reason: str | None) -> dict[str, Any]:
        """An event of a stream: new text of answer ``index``, and why the answer ended, if it did."""
        finish = None if reason is None else FINISHED[reason]
        if not self.chat:
            choice: dict[str, Any] = {"index": index, "text": text}
        else:
            delta = {"content": text} if text or reason is None else {}
            if index not in self._begun:
                self._begun.add(index)
                delta = {"role": "assistant", "content": text}
            choice = {"index": index, "delta": delta}
        choice |= {"logprobs": self.logprobs.take(index), "finish_reason": finish}
        return {**self._head(True), "choices": [choice]}

    def usage_chunk(self, output: RequestOutput) -> dict[str, Any]:
        """The last event of a stream, if usage was requested."""
        return {**self._head(True), "choices": [], "usage": usage(output)}

    def whole(self, texts: Sequence[str], output: RequestOutput) -> dict[str, Any]:
        """A response that is not streamed."""
        choices: list[dict[str, Any]] = []
        # A request that ran out of time before its prompt was processed has one reason for all answers.
        reasons = output.finish_reasons
        reasons = reasons * len(texts) if len(reasons) == 1 else reasons
        for index, (text, reason) in enumerate(zip(texts, reasons, strict=True)):
            said = (
                {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
            )
            if index < len(output.logprobs or ()):
                self.logprobs.put(index, output.logprobs[index])
            logprobs = self.logprobs.take(index)
            choices.append(
                {"index": index, **said, "logprobs": logprobs, "finish_reason": FINISHED[reason]}
            )
        return {**self._head(False), "choices": choices, "usage": usage(output)}


def usage(output: RequestOutput) -> dict[str, Any]:
    """Token counts; ``cached_tokens`` of the prompt were found in cached pages."""
    prompt, new = len(output.prompt_ids), sum(map(len, output.answers))
    return {
        "prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": output.metrics.prefix_hit_tokens},
    }  # fmt: skip


class StopTrimmer:
    """Removes the stop string that ended an answer, and all after it, from its text.

    Text that may be the beginning of a stop string is held back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops, self._held = tuple(stops), ""

    def take(self, event: Event) -> str:
        """The text of an event that may be sent."""
        return self.put(event.text, event.finish_reason is not None, event.stop_text)

    def put(self, text: str, over: bool = False, stop_text: str = "") -> str:
        """Adds text, and at its end what begins with the stop string (`Event.stop_text`); returns what may be sent."""
        self._held += text
        # Of a stop string that has special tokens the text has the part before them.
        kept = _overlap(self._held, (stop_text,)) if over else self._might_stop()
        found = self._held[: len(self._held) - kept]
        self._held = self._held[len(found) :]
        return found

    def _might_stop(self) -> int:
        """Number of characters at the end that may begin a stop string."""
        return _overlap(self._held, [stop[:-1] for stop in self._stops])


def _overlap(text: str, others: Sequence[str]) -> int:
    """Most characters at the end of a text that one of the others begins with."""
    counts = range(min(len(text), max(map(len, others), default=0)), 0, -1)
    return next((n for n in counts if any(o.startswith(text[-n:]) for o in others)), 0)
