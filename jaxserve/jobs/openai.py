"""Rows of OpenAI's batch files: `{"custom_id", "method", "url", "body"}`, chat completions and completions.

https://platform.openai.com/docs/api-reference/batch
"""

from typing import TYPE_CHECKING

from jaxserve.results import Completion, TokenLogprobs

if TYPE_CHECKING:
    from jaxserve.engine import Engine
    from jaxserve.jobs.rows import Row

ENDPOINTS = {"/v1/chat/completions": "messages", "/v1/completions": "prompt"}  # url → what its body asks with
OPTIONS = {  # a body's name → the field of SamplingParams
    "max_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "stop": "stop",
    "seed": "seed",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    # not OpenAI's, but of common servers with the same interface
    "top_k": "top_k",
    "min_p": "min_p",
    "repeat_penalty": "repeat_penalty",
    "repeat_last_n": "repeat_last_n",
    "stop_tokens": "stop_tokens",
    "ignore_eos": "ignore_eos",
}
UNUSED = {"model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
ONLY = {  # what is served only as it is by default
    "n": 1,
    "best_of": 1,
    "stream": False,
    "echo": False,
    "suffix": "",
    "logit_bias": {},
    "response_format": {"type": "text"},
    "tool_choice": "auto",
    "parallel_tool_calls": True,
}
OTHERS = {"messages", "prompt", "tools", "logprobs", "top_logprobs"}


def question(given: dict) -> tuple[str | list, dict, list | None]:
    """(prompt, options, tools) of a row."""
    body = given.get("body")
    if not isinstance(given.get("custom_id"), str):
        raise TypeError(f"custom_id={given.get('custom_id')!r}: expected a string")
    if not isinstance(body, dict):
        raise TypeError(f"body is a {type(body).__name__}: expected an object")
    body = {name: value for name, value in body.items() if value is not None}
    name = asks_with(given)
    for field, value in body.items():
        if field in ONLY and value != ONLY[field]:
            raise ValueError(f"{field}={value!r} is not served: expected {ONLY[field]!r}")
        if field not in ONLY and field not in OPTIONS and field not in UNUSED and field not in OTHERS:
            raise ValueError(f"unknown field {field!r} in the body")
    options = {OPTIONS[field]: value for field, value in body.items() if field in OPTIONS}
    if logprobs := wanted_logprobs(body, is_chat=name == "messages"):
        options["logprobs"] = logprobs
    return prompt_of(body, name), options, body.get("tools")


def asks_with(given: dict) -> str:
    """ "messages" or "prompt": by the row's url, or by its body where it has none."""
    url = given.get("url")
    if url is None:
        return "messages" if "messages" in given["body"] else "prompt"
    if url not in ENDPOINTS:
        raise ValueError(f"url={url!r}: expected one of {', '.join(ENDPOINTS)}")
    return ENDPOINTS[url]


def prompt_of(body: dict, name: str) -> str | list:
    """Text, ids, or messages whose content is plain text."""
    prompt = body.get(name)
    is_text = name == "prompt" and isinstance(prompt, str)
    item = int if name == "prompt" else dict
    is_list = isinstance(prompt, list) and all(type(each) is item for each in prompt)
    if not prompt or not (is_text or is_list):
        wanted = "a text or a list of token ids" if name == "prompt" else "a list of messages"
        raise TypeError(f"{name}={prompt!r:.80}: expected {wanted}")
    return (
        [message | {"content": plain(message.get("content"))} for message in prompt]
        if item is dict
        else prompt
    )


def plain(content: object) -> object:
    """A message's content with its text parts joined."""
    if not isinstance(content, list):
        return content
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError(
                f"a part of a message is {part!r:.80}: expected text, this engine reads no other"
            )
    return "".join(part["text"] for part in content)


def wanted_logprobs(body: dict, *, is_chat: bool) -> int:
    """How many log-probabilities to ask for: one at least where any are wanted."""
    asked = body.get("logprobs", False)
    if not is_chat:
        return 0 if asked is False else max(asked, 1)
    if not isinstance(asked, bool):
        raise TypeError(f"logprobs={asked!r}: expected true or false; top_logprobs says how many")
    return max(body.get("top_logprobs", 0), 1) if asked else 0


def form(row: "Row", completion: Completion, engine: "Engine | None" = None) -> dict:
    """The row of the output that answers a row, less its digest.

    `created` is 0: a row that is answered again is the same, byte for byte.
    """
    out = {"id": f"batch_req_{row.digest}", "custom_id": row.id, "response": None, "error": None}
    if completion.finish_reason == "error":
        return out | {"error": {"code": "invalid_request", "message": completion.error}}
    is_chat = asks_with(row.given) == "messages"
    shape = chat_body if is_chat else completion_body
    body = {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{row.digest}",
        "created": 0,
        "model": row.given["body"].get("model"),
        **shape(completion, engine),
        "usage": {
            "prompt_tokens": completion.prompt_tokens,
            "completion_tokens": len(completion.tokens),
            "total_tokens": completion.prompt_tokens + len(completion.tokens),
            "prompt_tokens_details": {"cached_tokens": completion.cached_tokens},
        },
    }
    return out | {"response": {"status_code": 200, "request_id": row.digest, "body": body}}


def chat_body(completion: Completion, engine: "Engine | None") -> dict:
    """What a chat completion has that a completion has not."""
    entries = completion.logprobs
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": completion.text, "refusal": None},
        "logprobs": None if entries is None else {"content": [chat_logprobs(e, engine) for e in entries]},
        "finish_reason": completion.finish_reason,
    }
    return {"object": "chat.completion", "choices": [choice]}


def completion_body(completion: Completion, engine: "Engine | None") -> dict:
    """What a completion has that a chat completion has not."""
    entries, logprobs = completion.logprobs, None
    if entries is not None:
        text = lambda token: engine.tokenizer.decode([token], skip_special=False)  # noqa: E731
        pieces = [text(entry.token) for entry in entries]
        logprobs = {
            "tokens": pieces,
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": [{text(token): value for token, value in entry.top} for entry in entries],
            "text_offset": [len("".join(pieces[:index])) for index in range(len(pieces))],
        }
    choice = {
        "index": 0,
        "text": completion.text,
        "logprobs": logprobs,
        "finish_reason": completion.finish_reason,
    }
    return {"object": "text_completion", "choices": [choice]}


def chat_logprobs(entry: TokenLogprobs, engine: "Engine") -> dict:
    """One token of a chat completion with its likeliest alternatives."""

    def one(token: int, logprob: float) -> dict:
        data = engine.tokenizer.token_bytes(token, skip_special=False)
        return {"token": data.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(data)}

    return one(entry.token, entry.logprob) | {"top_logprobs": [one(*pair) for pair in entry.top]}
