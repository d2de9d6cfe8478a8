"""Lines of a job's input and output: what a row asks, what is refused, and the shapes of answers."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve import Completion, PhaseTimings, SamplingParams, TokenLogprobs
from jaxserve.batch import refusal
from jaxserve.jobs.rows import Question, as_line, digest_of, read_row
from tests.engines import SCRIPT, scripted

DEFAULTS = SamplingParams(max_tokens=9)
STAMP = "0123/8/packed"


def row(line: object, number: int = 7, defaults: SamplingParams = DEFAULTS):
    data = line if isinstance(line, bytes) else json.dumps(line).encode()
    return read_row(data, number, defaults)


def openai(body: dict, **fields):
    return row({"custom_id": "c", "method": "POST", "url": "/v1/chat/completions", "body": body} | fields)


def completion(**fields) -> Completion:
    plain = dict(tokens=[7, 8], text="Paris.", finish_reason="stop", prompt_tokens=5, cached_tokens=3)
    return Completion(**plain | dict(route="prefill", timings=PhaseTimings()) | fields)


def answer(question, done: Completion, engine=None) -> dict:
    return json.loads(question.answer(done, STAMP, engine))


# -- native rows


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ({"prompt": "hi"}, "hi"),
        ({"prompt_tokens": [1, 2]}, [1, 2]),
        ({"messages": [{"role": "user", "content": "hi"}]}, [{"role": "user", "content": "hi"}]),
        ({"prompt": "hi", "messages": None}, "hi"),
    ],
)
def test_a_prompt_is_text_ids_or_messages(prompt, expected):
    assert row({"id": "x", **prompt}).question == Question(expected, DEFAULTS)


def test_fields_of_sampling_params_stand_beside_the_prompt():
    fields = dict(temperature=0.5, top_k=3, stop=["a", "b"], stop_tokens=[4], seed=2**64 - 1, ignore_eos=True)
    question = row({"prompt": "hi", "max_tokens": 3, **fields}).question
    assert question.params == SamplingParams(max_tokens=3, **fields)


def test_what_a_row_does_not_set_comes_from_the_flags():
    question = row({"prompt": "hi", "seed": None}, defaults=SamplingParams(seed=3, max_tokens=5)).question
    assert question.params == SamplingParams(seed=3, max_tokens=5)


@pytest.mark.parametrize(
    ("given_id", "expected"),
    [("x", "x"), (0, 0), (12, 12), ("", ""), (None, 7), (True, 7), (1.5, 7), ([], 7)],
)
def test_an_id_is_a_string_or_an_integer_and_a_missing_one_the_number_of_the_line(given_id, expected):
    read = row({"id": given_id, "prompt": "hi"})
    assert (read.id, type(read.id)) == (expected, type(expected))
    is_refused = given_id is not None and expected == 7
    assert isinstance(read.question, TypeError) == is_refused


@pytest.mark.parametrize(
    ("line", "word"),
    [
        (b"{not json", "line 7 is not JSON"),
        (b"\xff\xfe", "line 7 is not JSON"),
        (b"[" * 100_000, "line 7 is not JSON"),
        (b"[1, 2]", "expected an object"),
        (b"null", "expected an object"),
        ({}, "no prompt"),
        ({"prompt": "a", "prompt_tokens": [1]}, "prompt and prompt_tokens"),
        ({"prompt": ""}, "empty"),
        ({"prompt": ["a"]}, "expected a str"),
        ({"prompt_tokens": []}, "empty"),
        ({"prompt_tokens": [1, "2"]}, r"prompt_tokens\[1\]"),
        ({"prompt_tokens": [True]}, r"prompt_tokens\[0\]"),
        ({"messages": ["hi"]}, r"messages\[0\]"),
        ({"prompt": "a", "tempreature": 1}, "unknown field 'tempreature'"),
        ({"prompt": "a", "temperature": -1}, "temperature"),
        ({"prompt": "a", "max_tokens": "9"}, "max_tokens"),
        ({"prompt": "a", "seed": 10**400}, "seed"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_row_that_makes_no_sense_says_why(line, word):
    read = row(line)
    with pytest.raises((ValueError, TypeError), match=word):
        read.request(engine=None)
    assert read.id == 7


def test_a_byte_order_mark_before_the_first_line_is_no_part_of_it():
    line = b"\xef\xbb\xbf" + json.dumps({"prompt": "hi"}).encode()
    assert row(line, number=1).question.prompt == "hi"
    assert isinstance(row(line, number=2).question, ValueError)


def test_a_carriage_return_at_the_end_is_no_part_of_a_row():
    assert row(b'{"prompt": "hi"}\r\n').question.prompt == "hi"


def test_messages_are_rendered_and_only_the_template_writes_special_tokens():
    engine = scripted()
    messages = [{"role": "user", "content": "<|eot_id|>"}]
    request = row({"messages": messages}).request(engine)
    chat = engine.tokenizer.encode_chat(messages)
    assert (list(request.ids), request.borders) == (chat.ids, chat.borders)
    assert list(row({"prompt": "hi"}).request(engine).ids) == engine.tokenizer.encode("hi")
    assert list(row({"prompt_tokens": [5, 6]}).request(engine).ids) == [5, 6]


# -- digests


def test_a_digest_changes_with_whatever_is_asked():
    base = {"id": "x", "prompt": "hi", "seed": 1}
    same = [row(base), row({"seed": 1, "prompt": "hi", "id": "x"}), row(base, number=9)]
    assert len({each.digest for each in same}) == 1
    others = [base | {"prompt": "ho"}, base | {"seed": 2}, base | {"top_k": 1}, {"id": "x", "prompt": "hi"}]
    digests = {row(other).digest for other in others} | {row(base, defaults=SamplingParams()).digest}
    assert len(digests | {same[0].digest}) == 6


def test_a_broken_line_has_a_digest_of_its_bytes():
    assert row(b"{a").digest == row(b"{a").digest != row(b"{b").digest


def test_a_digest_of_plain_data_does_not_depend_on_the_order_of_keys():
    assert digest_of({"a": 1, "b": [2]}) == digest_of({"b": [2], "a": 1}) != digest_of({"a": 1, "b": [3]})


# -- answers


def test_a_native_answer_has_the_documented_fields():
    assert answer(row({"id": "x", "prompt": "hi"}), completion()) == {
        "id": "x",
        "text": "Paris.",
        "tokens": [7, 8],
        "finish_reason": "stop",
        "prompt_tokens": 5,
        "cached_tokens": 3,
        "error": None,
        "digest": STAMP,
    }


def test_an_error_is_an_answer():
    out = answer(row({"id": "x"}), refusal(ValueError("no prompt")))
    assert (out["id"], out["finish_reason"], out["error"], out["tokens"]) == ("x", "error", "no prompt", [])


def test_log_probabilities_that_were_asked_for_are_in_the_answer():
    done = completion(logprobs=[TokenLogprobs(7, -0.5, ((7, -0.5), (3, -1.5)))])
    out = answer(row({"prompt": "hi", "logprobs": 2}), done)
    assert out["logprobs"] == [{"token": 7, "logprob": -0.5, "top": [[7, -0.5], [3, -1.5]]}]


@given(st.text(st.characters(codec=None)))
def test_any_text_makes_one_line_that_reads_back(text):
    line = as_line({"text": text})
    assert line.endswith(b"\n") and len(line.decode().splitlines()) == 1
    assert json.loads(line) == {"text": text}


def test_text_stays_readable():
    assert "語é" in as_line({"text": "語é"}).decode()


# -- rows of OpenAI's batch files

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def test_a_chat_row_asks_with_messages():
    question = openai(
        CHAT | {"max_completion_tokens": 5, "temperature": 0.5, "stop": "x", "seed": 3}
    ).question
    assert question.prompt == CHAT["messages"]
    assert question.params == SamplingParams(max_tokens=5, temperature=0.5, stop="x", seed=3)


@pytest.mark.parametrize("url", ["/v1/completions", None])
@pytest.mark.parametrize("prompt", ["hi", [1, 2]])
def test_a_completion_row_asks_with_a_prompt(url, prompt):
    assert openai({"prompt": prompt, "max_tokens": 4}, url=url).question.prompt == prompt


def test_text_parts_of_a_message_are_joined():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    question = openai({"messages": [{"role": "user", "content": parts}]}).question
    assert question.prompt == [{"role": "user", "content": "ab"}]


def test_tools_reach_the_template():
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert openai(CHAT | {"tools": tools}).question.tools == tools


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        (CHAT, 0),
        (CHAT | {"logprobs": False, "top_logprobs": 3}, 0),
        (CHAT | {"logprobs": True}, 1),
        (CHAT | {"logprobs": True, "top_logprobs": 3}, 3),
        ({"prompt": "hi", "logprobs": 2}, 2),
        ({"prompt": "hi", "logprobs": 0}, 1),
        ({"prompt": "hi", "logprobs": None}, 0),
    ],
    ids=str,
)
def test_log_probabilities_are_asked_for_as_there(body, wanted):
    assert openai(body, url=None).question.params.logprobs == wanted


def test_values_that_change_nothing_are_taken():
    harmless = {
        "n": 1,
        "stream": False,
        "logit_bias": {},
        "user": "me",
        "metadata": {"a": "b"},
        "top_p": None,
    }
    assert isinstance(openai(CHAT | harmless).question, Question)


@pytest.mark.parametrize(
    ("body", "word"),
    [
        (CHAT | {"n": 2}, "n=2"),
        (CHAT | {"stream": True}, "stream=True"),
        (CHAT | {"response_format": {"type": "json_object"}}, "response_format"),
        (CHAT | {"tempreature": 1}, "unknown field 'tempreature'"),
        (CHAT | {"logprobs": 3}, "logprobs"),
        (CHAT | {"temperature": 3e999}, "temperature"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "part of a message"),
        ({"prompt": "hi"}, "messages"),
        ([1], "body"),
        (None, "body"),
    ],
    ids=lambda value: str(value)[-40:],
)
def test_what_is_not_served_is_an_error_in_the_openai_shape(body, word):
    read = openai(body)
    with pytest.raises((ValueError, TypeError), match=word) as caught:
        read.request(engine=None)
    out = answer(read, refusal(caught.value))
    assert (out["custom_id"], out["response"]) == ("c", None)
    assert word in out["error"]["message"] and out["digest"] == STAMP


@pytest.mark.parametrize("url", ["/v1/embeddings", "", 3])
def test_other_endpoints_are_refused(url):
    assert "url" in str(openai(CHAT, url=url).question)


@pytest.mark.parametrize("own_id", [5, None])
def test_a_custom_id_is_a_string(own_id):
    read = openai(CHAT, custom_id=own_id)
    assert isinstance(read.question, TypeError) and read.id == (5 if own_id else 7)


def test_a_chat_is_answered_as_a_chat_completion():
    out = answer(openai(CHAT), completion(finish_reason="length"))
    assert (out["custom_id"], out["error"], out["digest"]) == ("c", None, STAMP)
    assert out["response"]["status_code"] == 200
    body = out["response"]["body"]
    assert (body["object"], body["model"], body["id"][:9]) == ("chat.completion", "m", "chatcmpl-")
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Paris.", "refusal": None}
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "length", None)
    usage = body["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (5, 2, 7)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 3}


def test_a_completion_is_answered_as_a_text_completion():
    body = answer(openai({"prompt": "hi"}, url="/v1/completions"), completion())["response"]["body"]
    assert (body["object"], body["id"][:5]) == ("text_completion", "cmpl-")
    assert body["choices"] == [{"index": 0, "text": "Paris.", "logprobs": None, "finish_reason": "stop"}]


def test_log_probabilities_have_the_texts_of_their_tokens():
    engine = scripted()
    prompt = [SCRIPT.start["greek"]]
    first, second = SCRIPT.tokens["greek"][:2]  # "al", "pha be"
    done = engine.generate(prompt, SamplingParams(max_tokens=2, logprobs=1))
    asked = openai({"prompt": prompt, "logprobs": 1}, url=None)
    logprobs = answer(asked, done, engine)["response"]["body"]["choices"][0]["logprobs"]
    assert (logprobs["tokens"], logprobs["text_offset"]) == (["al", "pha be"], [0, 2])
    assert logprobs["top_logprobs"][0] == {"al": logprobs["token_logprobs"][0]}
    chat = answer(openai(CHAT | {"logprobs": True}), done, engine)["response"]["body"]["choices"][0]
    content = chat["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["al", "pha be"]
    assert content[0]["bytes"] == list(b"al") and content[0]["top_logprobs"][0]["token"] == "al"
    assert (first, second) == tuple(done.tokens)
