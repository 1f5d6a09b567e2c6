"""The official OpenAI SDK for Python, sync and async, as a judge: what it parses is what clients get.

usage: python.sh openai_sdk.py DOORS   (JSON, see common.py)
"""

import asyncio
import json
import time
from typing import Literal

import openai
from pydantic import BaseModel

from common import CALLS, GREETING, OBJECT, THOUGHT, TOLD, WEATHER, doors, fails, play, question, report, verdict


class City(BaseModel):
    city: str
    degrees: int
    tags: list[str]


class Fruit(BaseModel):
    fruit: Literal["apple", "pear"]
    ripe: bool


class Weather(BaseModel):
    city: str
    days: int


def connect(base, kind=openai.OpenAI, **more):
    return kind(**{"base_url": base, "api_key": "none", "max_retries": 0, "timeout": 120, **more})


real, scripted = connect(doors["real"]), connect(doors["scripted"])
model, theirs = real.models.list().data[0].id, scripted.models.list().data[0].id
assert real.models.retrieve(model).id == model
cancelled = 0


def text_of(chunks):
    return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)


def chat():
    ask = {"model": model, "messages": question, "max_tokens": 8, "temperature": 0}
    raw = real.chat.completions.with_raw_response.create(**ask, extra_headers={"X-PD-Bridge-Route": "bridge"})
    told, answer = verdict(raw.headers), raw.parse()
    assert told["verdict"] in ("complete", "warm"), told
    assert told["cached_tokens"] == told["prompt_tokens"] - 1
    assert answer.usage.prompt_tokens == told["prompt_tokens"]
    assert answer.usage.prompt_tokens_details.cached_tokens == told["cached_tokens"]
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (8, "length")
    assert answer.choices[0].message.role == "assistant"
    whole = answer.choices[0].message.content

    chunks = list(real.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    assert text_of(chunks) == whole, (text_of(chunks), whole)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].usage.completion_tokens == 8 and not chunks[-1].choices
    assert len({c.id for c in chunks}) == 1

    with real.chat.completions.with_streaming_response.create(
            model=model, messages=question, max_tokens=3, stream=True) as response:
        assert verdict(response.headers)["prompt_tokens"] == told["prompt_tokens"]
        lines = [line for line in response.iter_lines() if line]
        assert lines[-1] == "data: [DONE]" and lines.count("data: [DONE]") == 1

    prompt = {"model": model, "prompt": "once upon a time", "max_tokens": 4, "temperature": 0}
    completion = real.completions.create(**prompt)
    assert completion.choices[0].text and completion.usage.completion_tokens == 4
    streamed = real.completions.create(**prompt, stream=True)
    assert "".join(c.choices[0].text for c in streamed) == completion.choices[0].text

    seeded = [real.chat.completions.create(**{**ask, "temperature": 1, "max_tokens": 6}, seed=7).choices[0].message.content
              for _ in range(2)]
    assert seeded[0] == seeded[1], seeded
    stopped = real.chat.completions.create(**ask, stop=whole[2:4])
    assert whole[2:4] not in stopped.choices[0].message.content and stopped.choices[0].finish_reason == "stop"

    greeting = scripted.chat.completions.create(model=theirs, messages=play("greet"))
    assert greeting.choices[0].message.content == GREETING and greeting.choices[0].finish_reason == "stop"
    assert greeting.usage.completion_tokens == len(GREETING.encode())
    letters = list(scripted.chat.completions.create(model=theirs, messages=play("greet"), stream=True))
    assert text_of(letters) == GREETING and len(letters) > 20
    thought = scripted.chat.completions.create(model=theirs, messages=play("think")).choices[0].message
    assert (thought.reasoning_content, thought.reasoning, thought.content) == (THOUGHT, THOUGHT, "42")


def tools():
    declared = {"type": "function", "function": {"name": "weather", "description": "The weather", "parameters": WEATHER}}
    body = {"model": theirs, "messages": play("weather"), "tools": [declared]}
    choice = scripted.chat.completions.create(**body).choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me see.\n"
    assert [json.loads(c.function.arguments) for c in choice.message.tool_calls] == CALLS
    assert len({c.id for c in choice.message.tool_calls}) == 2

    with scripted.chat.completions.stream(**body) as stream:
        events = list(stream)
        final = stream.get_final_completion().choices[0]
    deltas = [e.arguments_delta for e in events if e.type == "tool_calls.function.arguments.delta"]
    assert sum(bool(d) for d in deltas) > 6, deltas
    done = [json.loads(e.arguments) for e in events if e.type == "tool_calls.function.arguments.done"]
    assert done == CALLS and final.finish_reason == "tool_calls"
    assert [c.function.arguments for c in final.message.tool_calls] == \
        [c.function.arguments for c in choice.message.tool_calls]

    results = [{"role": "tool", "tool_call_id": c.id, "content": f"rain in {json.loads(c.function.arguments)['city']}"}
               for c in choice.message.tool_calls]
    told = scripted.chat.completions.create(
        model=theirs, tools=[declared], messages=[*play("weather"), choice.message, *results])
    assert told.choices[0].message.content == TOLD

    parsed = scripted.chat.completions.parse(
        model=theirs, messages=play("weather"), tools=[openai.pydantic_function_tool(Weather, name="weather")])
    assert [c.function.parsed_arguments for c in parsed.choices[0].message.tool_calls] == [Weather(**c) for c in CALLS]
    # The real model is forced by a grammar, so that whatever it calls can be parsed.
    forced = real.chat.completions.parse(
        model=model, messages=question, max_tokens=60, temperature=0, parallel_tool_calls=False, tool_choice="required",
        tools=[openai.pydantic_function_tool(Fruit, name="pick")])
    assert forced.choices[0].finish_reason == "tool_calls"
    assert isinstance(forced.choices[0].message.tool_calls[0].function.parsed_arguments, Fruit)


def structured():
    parsed = scripted.chat.completions.parse(model=theirs, messages=play("object"), response_format=City)
    assert parsed.choices[0].message.parsed == City(**OBJECT)
    with scripted.chat.completions.stream(model=theirs, messages=play("object"), response_format=City) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == City(**OBJECT)
    forced = real.chat.completions.parse(
        model=model, messages=question, max_tokens=60, temperature=0, response_format=Fruit)
    assert isinstance(forced.choices[0].message.parsed, Fruit) and forced.choices[0].finish_reason == "stop"


def responses():
    ask = {"model": model, "input": question, "max_output_tokens": 6, "temperature": 0}
    raw = real.responses.with_raw_response.create(**ask)
    verdict(raw.headers)
    answer = raw.parse()
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.usage.output_tokens == 6 and answer.output_text
    events = list(real.responses.create(**ask, stream=True))
    assert [e.sequence_number for e in events] == list(range(len(events)))
    assert (events[0].type, events[-1].type) == ("response.created", "response.incomplete")
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == answer.output_text

    with scripted.responses.stream(model=theirs, input="play: greet") as stream:
        types = [e.type for e in stream]
        final = stream.get_final_response()
    assert (final.output_text, final.status, types[-1]) == (GREETING, "completed", "response.completed")
    assert final.usage.output_tokens == len(GREETING.encode())
    assert scripted.responses.parse(model=theirs, input="play: object", text_format=City).output_parsed == City(**OBJECT)

    tool = {"type": "function", "name": "weather", "strict": True, "parameters": WEATHER}
    calls = scripted.responses.create(model=theirs, input="play: weather", tools=[tool]).output[1:]
    assert [json.loads(c.arguments) for c in calls] == CALLS and {c.type for c in calls} == {"function_call"}
    results = [{"type": "function_call_output", "call_id": c.call_id,
                "output": f"rain in {json.loads(c.arguments)['city']}"} for c in calls]
    told = scripted.responses.create(model=theirs, tools=[tool], input=[*play("weather"), *calls, *results])
    assert told.output_text == TOLD
    thought = scripted.responses.create(model=theirs, input="play: think")
    assert [item.type for item in thought.output] == ["reasoning", "message"]
    assert (thought.output[0].content[0].text, thought.output_text) == (THOUGHT, "42")


def errors():
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/x.png"}}]}]
    chat, guarded = real.chat.completions.create, connect(doors["guarded"]).chat.completions.create
    for call, kind, status, code, param in (
            (lambda: chat(model="no-such-model", messages=question), openai.NotFoundError, 404, "model_not_found", "model"),
            (lambda: chat(model=model, messages=question, temperature=9), openai.BadRequestError, 400, "invalid_value",
             "temperature"),
            (lambda: chat(model=model, messages=[]), openai.BadRequestError, 400, "invalid_value", "messages"),
            (lambda: chat(model=model, messages=image), openai.BadRequestError, 400, "unsupported_value",
             "messages[0].content[0]"),
            (lambda: real.responses.create(model=model, input="x", previous_response_id="resp_1"), openai.BadRequestError,
             400, "unsupported_value", "previous_response_id"),
            (lambda: guarded(model=theirs, messages=play("greet")), openai.AuthenticationError, 401, "invalid_api_key",
             None)):
        error = fails(call, kind)
        assert (error.status_code, error.code, error.param) == (status, code, param), error
        assert error.body["message"] and error.type, error.body
        verdict(error.response.headers)


def cancels():
    global cancelled
    body = {"model": theirs, "messages": play("long")}
    with scripted.chat.completions.create(**body, stream=True) as stream:
        for _, chunk in zip(range(3), stream):
            assert chunk.choices[0].delta.content in ("", "x")
    cancelled += 1
    fails(lambda: scripted.with_options(timeout=0.2).chat.completions.create(**body), openai.APITimeoutError)
    cancelled += 1


def noting(statuses, on_refusal=lambda: None):
    """An HTTP client that notes the status of every answer."""
    def note(response):
        verdict(response.headers)
        statuses.append(response.status_code)
        if response.status_code == 429:
            on_refusal()
    return openai.DefaultHttpxClient(event_hooks={"response": [note]}, timeout=60)


def retries():
    global cancelled
    ask = {"model": theirs, "messages": play("greet")}
    # One request at a time is this key's limit: the second is refused until the first is gone.
    first = connect(doors["guarded"], api_key=doors["key"]).chat.completions.create(
        model=theirs, messages=play("long"), stream=True)
    next(first)
    error = fails(lambda: connect(doors["guarded"], api_key=doors["key"]).chat.completions.create(**ask),
                  openai.RateLimitError)
    assert error.type == "rate_limit_error" and int(error.response.headers["retry-after"]) >= 1
    statuses = []
    patient = connect(doors["guarded"], api_key=doors["key"], max_retries=3, http_client=noting(statuses, first.close))
    assert patient.chat.completions.create(**ask).choices[0].message.content == GREETING
    assert statuses == [429, 200], statuses
    cancelled += 1

    statuses = []
    waiting = connect(doors["late"], max_retries=12, http_client=noting(statuses))
    assert waiting.chat.completions.create(**ask).choices[0].message.content == GREETING
    assert len(statuses) >= 2 and statuses[-1] == 200 and set(statuses[:-1]) == {503}, statuses


async def asynchronous():
    global cancelled
    ours, acting = (connect(doors[door], openai.AsyncOpenAI) for door in ("real", "scripted"))
    ask = {"model": model, "messages": question, "max_tokens": 8, "temperature": 0}
    whole, stream = await asyncio.gather(ours.chat.completions.create(**ask), ours.chat.completions.create(**ask, stream=True))
    assert text_of([c async for c in stream]) == whole.choices[0].message.content
    async with acting.chat.completions.stream(
            model=theirs, messages=play("weather"), tools=[openai.pydantic_function_tool(Weather, name="weather")]) as stream:
        final = await stream.get_final_completion()
    assert [c.function.parsed_arguments for c in final.choices[0].message.tool_calls] == [Weather(**c) for c in CALLS]
    parsed = await acting.chat.completions.parse(model=theirs, messages=play("object"), response_format=City)
    assert parsed.choices[0].message.parsed == City(**OBJECT)
    async with acting.responses.stream(model=theirs, input="play: greet") as stream:
        assert (await stream.get_final_response()).output_text == GREETING
    try:
        await ours.chat.completions.create(model="no-such-model", messages=question)
    except openai.NotFoundError as error:
        verdict(error.response.headers)
    else:
        raise AssertionError("no NotFoundError")
    task = asyncio.create_task(acting.chat.completions.create(model=theirs, messages=play("long")))
    await asyncio.sleep(0.3)
    task.cancel()
    assert isinstance((await asyncio.gather(task, return_exceptions=True))[0], asyncio.CancelledError)
    cancelled += 1
    greetings = await asyncio.gather(*(
        acting.chat.completions.create(model=theirs, messages=play("greet")) for _ in range(16)))
    assert {g.choices[0].message.content for g in greetings} == {GREETING} and len({g.id for g in greetings}) == 16


def in_async():
    asyncio.run(asynchronous())


took_ms = {}
for check in (chat, tools, structured, responses, errors, cancels, retries, in_async):
    begun = time.monotonic()
    check()
    took_ms[check.__name__] = round(1000 * (time.monotonic() - begun))
report(f"openai (Python) {openai.__version__}", cancelled, took_ms)
