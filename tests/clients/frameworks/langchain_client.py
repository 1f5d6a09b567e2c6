"""LangChain's ChatOpenAI, over both of OpenAI's endpoints, as a judge.

usage: frameworks.sh langchain_client.py DOORS   (JSON, see common.py)
"""

import asyncio
import pathlib
import sys
import time
from importlib.metadata import version
from typing import Literal

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import openai
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

from common import CALLS, GREETING, OBJECT, THOUGHT, TOLD, doors, fails, question, report, verdict


class City(BaseModel):
    """A city and its weather."""

    city: str
    degrees: int
    tags: list[str]


class Fruit(BaseModel):
    """A fruit."""

    fruit: Literal["apple", "pear"]


@tool
def weather(city: str, days: int) -> str:
    """The weather of a city."""
    return f"rain in {city}"


def served(base):
    return openai.OpenAI(base_url=base, api_key="none").models.list().data[0].id


model, theirs = served(doors["real"]), served(doors["scripted"])
asked = [SystemMessage(question[0]["content"]), HumanMessage(question[1]["content"])]
cancelled = 0


def real(**more):
    return ChatOpenAI(**{"model": model, "base_url": doors["real"], "api_key": "none", "temperature": 0, "max_tokens": 8,
                         "max_retries": 0, "include_response_headers": True, **more})


def scripted(**more):
    return ChatOpenAI(**{"model": theirs, "base_url": doors["scripted"], "api_key": "none", "max_retries": 0,
                         "stream_usage": True, **more})


def chat():
    whole = real().invoke(asked)
    told = verdict(whole.response_metadata["headers"])
    assert whole.content and whole.response_metadata["finish_reason"] == "length", whole
    assert (whole.usage_metadata["input_tokens"], whole.usage_metadata["output_tokens"]) == (told["prompt_tokens"], 8)
    chunks = list(real(stream_usage=True).stream(asked))
    assert "".join(c.content for c in chunks) == whole.content
    total = sum(chunks[1:], chunks[0])
    assert total.usage_metadata["output_tokens"] == 8 and total.response_metadata["finish_reason"] == "length", total
    assert [m.content for m in real().batch([asked, asked])] == [whole.content] * 2

    greeting = scripted().invoke("play: greet")
    assert (greeting.content, greeting.usage_metadata["output_tokens"]) == (GREETING, len(GREETING.encode()))
    letters = list(scripted().stream("play: greet"))
    assert "".join(c.content for c in letters) == GREETING and len(letters) > 20
    completion = OpenAI(model=theirs, base_url=doors["scripted"], api_key="none", max_retries=0)
    assert completion.invoke("play: greet") == GREETING == "".join(completion.stream("play: greet"))


def tools():
    able = scripted().bind_tools([weather])
    answer = able.invoke("play: weather")
    assert answer.content == "Let me see.\n" and answer.response_metadata["finish_reason"] == "tool_calls"
    assert [(c["name"], c["args"]) for c in answer.tool_calls] == [("weather", call) for call in CALLS]
    chunks = list(able.stream("play: weather"))
    total = sum(chunks[1:], chunks[0])
    assert [c["args"] for c in total.tool_calls] == CALLS
    assert sum(len(c.tool_call_chunks) for c in chunks) > 6, "arguments come in pieces"
    results = [weather.invoke(call) for call in answer.tool_calls]
    assert all(isinstance(r, ToolMessage) for r in results)
    assert able.invoke([HumanMessage("play: weather"), answer, *results]).content == TOLD
    # The real model is forced by a grammar, so that whatever it calls can be parsed.
    forced = real(max_tokens=60).bind_tools([Fruit], tool_choice="Fruit", parallel_tool_calls=False).invoke(asked)
    assert isinstance(Fruit(**forced.tool_calls[0]["args"]), Fruit) and len(forced.tool_calls) == 1


def structured():
    for method in ("json_schema", "json_mode"):
        assert scripted().with_structured_output(City, method=method).invoke("play: object") == City(**OBJECT)
    assert list(scripted().with_structured_output(City, method="json_schema").stream("play: object"))[-1] == City(**OBJECT)
    assert isinstance(real(max_tokens=60).with_structured_output(Fruit, method="json_schema").invoke(asked), Fruit)


def responses():
    newer = scripted(use_responses_api=True)
    greeting = newer.invoke("play: greet")
    assert (greeting.text, greeting.usage_metadata["output_tokens"]) == (GREETING, len(GREETING.encode()))
    assert "".join(c.text for c in newer.stream("play: greet")) == GREETING
    thought = newer.invoke("play: think")
    kinds = [block["type"] for block in thought.content]
    assert kinds == ["reasoning", "text"] and thought.text == "42", thought.content
    assert thought.content[0]["content"][0]["text"] == THOUGHT, thought.content
    able = newer.bind_tools([weather])
    answer = able.invoke("play: weather")
    assert [c["args"] for c in answer.tool_calls] == CALLS
    results = [weather.invoke(call) for call in answer.tool_calls]
    assert able.invoke([HumanMessage("play: weather"), answer, *results]).text == TOLD
    again = newer.invoke([HumanMessage("play: think"), thought, HumanMessage("play: greet")])
    assert again.text == GREETING
    assert newer.with_structured_output(City).invoke("play: object") == City(**OBJECT)
    whole = real(use_responses_api=True).invoke(asked)
    assert "".join(c.text for c in real(use_responses_api=True).stream(asked)) == whole.text and whole.text
    assert whole.usage_metadata["output_tokens"] == 8


def errors():
    for call, kind, code in (
            (lambda: real(model="no-such-model").invoke(asked), openai.NotFoundError, "model_not_found"),
            (lambda: real(temperature=9).invoke(asked), openai.BadRequestError, "invalid_value"),
            (lambda: scripted(base_url=doors["guarded"]).invoke("play: greet"), openai.AuthenticationError,
             "invalid_api_key")):
        error = fails(call, kind)
        assert error.code == code, error
        verdict(error.response.headers)
    came = scripted(base_url=doors["late"], max_retries=12).invoke("play: greet")
    assert came.content == GREETING


async def asynchronous():
    global cancelled
    whole, chunks = await real().ainvoke(asked), [c async for c in real().astream(asked)]
    assert "".join(c.content for c in chunks) == whole.content
    answers = await scripted().abatch(["play: greet"] * 8)
    assert {a.content for a in answers} == {GREETING}
    seen = 0
    stream = scripted().astream("play: long")
    async for chunk in stream:
        seen += bool(chunk.content)
        if seen == 3:
            break
    await stream.aclose()
    cancelled += 1


def in_async():
    asyncio.run(asynchronous())


took_ms = {}
for check in (chat, tools, structured, responses, errors, in_async):
    begun = time.monotonic()
    check()
    took_ms[check.__name__] = round(1000 * (time.monotonic() - begun))
report(f"langchain-openai {version('langchain-openai')}", cancelled, took_ms)
