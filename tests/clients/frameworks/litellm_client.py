"""LiteLLM as a client, sync and async, as a judge.

usage: frameworks.sh litellm_client.py DOORS   (JSON, see common.py)
"""

import asyncio
import json
import os
import pathlib
import sys
import time
from importlib.metadata import version

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
# Its price list stays the one of the package.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm
from litellm import acompletion, completion
from pydantic import BaseModel

from common import CALLS, GREETING, OBJECT, THOUGHT, TOLD, WEATHER, doors, fails, play, question, report, verdict

litellm.telemetry = False
litellm.suppress_debug_info = True
litellm.return_response_headers = True
cancelled = 0


class City(BaseModel):
    city: str
    degrees: int
    tags: list[str]


def served(base):
    import openai
    return openai.OpenAI(base_url=base, api_key="none").models.list().data[0].id


def at(door, model, **more):
    return {"model": f"openai/{model}", "api_base": doors[door], "api_key": "none", "max_retries": 0, **more}


model, theirs = served(doors["real"]), served(doors["scripted"])
ask = at("real", model, messages=question, max_tokens=8, temperature=0)


def text_of(chunks):
    return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)


def chat():
    whole = completion(**ask, extra_headers={"X-PD-Bridge-Route": "bridge"})
    told = verdict(whole._response_headers)
    assert told["verdict"] in ("complete", "warm"), told
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (told["prompt_tokens"], 8)
    assert whole.usage.prompt_tokens_details.cached_tokens == told["cached_tokens"]
    assert whole.choices[0].finish_reason == "length"
    chunks = list(completion(**ask, stream=True, stream_options={"include_usage": True}))
    assert text_of(chunks) == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == 8 and chunks[-1].usage.prompt_tokens == told["prompt_tokens"]
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["length"]
    rebuilt = litellm.stream_chunk_builder(chunks, messages=question)
    assert rebuilt.choices[0].message.content == whole.choices[0].message.content

    greeting = completion(**at("scripted", theirs, messages=play("greet")))
    assert greeting.choices[0].message.content == GREETING and greeting.choices[0].finish_reason == "stop"
    assert greeting.usage.completion_tokens == len(GREETING.encode())
    letters = list(completion(**at("scripted", theirs, messages=play("greet"), stream=True)))
    assert text_of(letters) == GREETING and len(letters) > 20
    text = litellm.text_completion(**{**at("scripted", theirs), "model": f"text-completion-openai/{theirs}"}, prompt="play: greet")
    assert text.choices[0].text == GREETING


def thoughts():
    thought = completion(**at("scripted", theirs, messages=play("think"))).choices[0].message
    assert (thought.reasoning_content, thought.content) == (THOUGHT, "42")
    chunks = list(completion(**at("scripted", theirs, messages=play("think"), stream=True)))
    assert "".join(getattr(c.choices[0].delta, "reasoning_content", None) or "" for c in chunks) == THOUGHT
    assert text_of(chunks) == "42"


def tools():
    declared = {"type": "function", "function": {"name": "weather", "description": "The weather", "parameters": WEATHER}}
    body = at("scripted", theirs, messages=play("weather"), tools=[declared])
    choice = completion(**body).choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me see.\n"
    assert [json.loads(c.function.arguments) for c in choice.message.tool_calls] == CALLS
    chunks = list(completion(**body, stream=True))
    deltas = [d for c in chunks for d in c.choices[0].delta.tool_calls or []]
    joined = ["".join(d.function.arguments for d in deltas if d.index == i) for i in (0, 1)]
    assert [json.loads(j) for j in joined] == CALLS and len(deltas) > 6, deltas
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    rebuilt = litellm.stream_chunk_builder(chunks).choices[0].message
    assert [c.function.arguments for c in rebuilt.tool_calls] == [c.function.arguments for c in choice.message.tool_calls]
    results = [{"role": "tool", "tool_call_id": c.id, "content": f"rain in {json.loads(c.function.arguments)['city']}"}
               for c in choice.message.tool_calls]
    told = completion(**{**body, "messages": [*play("weather"), choice.message, *results]})
    assert told.choices[0].message.content == TOLD
    # The real model is forced by a grammar, so that whatever it calls can be parsed.
    pick = {"type": "function", "function": {"name": "pick", "parameters": {
        "type": "object", "properties": {"fruit": {"enum": ["apple", "pear"]}}, "required": ["fruit"]}}}
    forced = completion(**{**ask, "max_tokens": 60}, tools=[pick], tool_choice="required", parallel_tool_calls=False)
    assert json.loads(forced.choices[0].message.tool_calls[0].function.arguments)["fruit"] in ("apple", "pear")


def structured():
    answer = completion(**at("scripted", theirs, messages=play("object"), response_format=City))
    assert City.model_validate_json(answer.choices[0].message.content) == City(**OBJECT)
    forced = completion(**{**ask, "max_tokens": 60}, response_format={"type": "json_schema", "json_schema": {
        "name": "fruit", "strict": True, "schema": {"type": "object", "properties": {
            "fruit": {"enum": ["apple", "pear"]}}, "required": ["fruit"], "additionalProperties": False}}})
    assert json.loads(forced.choices[0].message.content)["fruit"] in ("apple", "pear")


def responses():
    answer = litellm.responses(**at("scripted", theirs), input="play: greet")
    assert answer.output[0].content[0].text == GREETING and answer.usage.output_tokens == len(GREETING.encode())
    events = list(litellm.responses(**at("scripted", theirs), input="play: greet", stream=True))
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == GREETING
    assert events[-1].type == "response.completed"


def errors():
    for call, kind in (
            (lambda: completion(**at("real", "no-such-model", messages=question)), litellm.NotFoundError),
            (lambda: completion(**{**ask, "temperature": 9}), litellm.BadRequestError),
            (lambda: completion(**at("guarded", theirs, messages=play("greet"))), litellm.AuthenticationError)):
        error = fails(call, kind)
        assert "{" not in str(error).split("OpenAIException - ")[-1], f"no plain message: {error}"
    came = completion(**{**at("late", theirs, messages=play("greet")), "max_retries": 12})
    assert came.choices[0].message.content == GREETING


async def asynchronous():
    global cancelled
    whole = await acompletion(**ask)
    chunks = [c async for c in await acompletion(**ask, stream=True)]
    assert text_of(chunks) == whole.choices[0].message.content
    answers = await asyncio.gather(*(acompletion(**at("scripted", theirs, messages=play("greet"))) for _ in range(8)))
    assert {a.choices[0].message.content for a in answers} == {GREETING}
    try:
        await acompletion(**at("scripted", theirs, messages=play("long"), timeout=0.3))
    except litellm.Timeout:
        cancelled += 1
    else:
        raise AssertionError("no Timeout")


def in_async():
    asyncio.run(asynchronous())


took_ms = {}
for check in (chat, thoughts, tools, structured, responses, errors, in_async):
    begun = time.monotonic()
    check()
    took_ms[check.__name__] = round(1000 * (time.monotonic() - begun))
report(f"litellm {version('litellm')}", cancelled, took_ms)
