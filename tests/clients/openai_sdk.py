"""The official OpenAI SDK against a running gateway: what it parses is what clients get.

usage: openai_sdk.py http://HOST:PORT
"""

import json
import sys

import openai

base = sys.argv[1]
client = openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0, timeout=120)
messages = [{"role": "system", "content": "You are terse."}, {"role": "user", "content": "Say something. " * 20}]

model = client.models.list().data[0].id
assert client.models.retrieve(model).id == model

raw = client.chat.completions.with_raw_response.create(
    model=model, messages=messages, max_tokens=12, temperature=0, extra_headers={"X-PD-Bridge-Route": "bridge"})
verdict = json.loads(raw.headers["x-pd-bridge"])
answer = raw.parse()
assert verdict["verdict"] == "complete", verdict
assert verdict["cached_tokens"] == verdict["prompt_tokens"] - 1
assert answer.usage.prompt_tokens == verdict["prompt_tokens"]
assert answer.usage.prompt_tokens_details.cached_tokens == verdict["cached_tokens"]
assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
assert answer.choices[0].finish_reason in ("stop", "length") and answer.choices[0].message.role == "assistant"
whole = answer.choices[0].message.content

stream = client.chat.completions.create(
    model=model, messages=messages, max_tokens=12, temperature=0, stream=True, stream_options={"include_usage": True})
chunks = list(stream)
text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
assert text == whole, (text, whole)
assert chunks[0].choices[0].delta.role == "assistant"
assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] in ("stop", "length")
assert chunks[-1].usage.completion_tokens == answer.usage.completion_tokens and not chunks[-1].choices
assert len({c.id for c in chunks}) == 1

with client.chat.completions.with_streaming_response.create(
        model=model, messages=messages, max_tokens=3, stream=True) as response:
    assert json.loads(response.headers["x-pd-bridge"])["verdict"] in ("warm", "complete")
    lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]" and lines.count("data: [DONE]") == 1

completion = client.completions.create(model=model, prompt="once upon a time", max_tokens=5, temperature=0)
assert completion.choices[0].text and completion.usage.completion_tokens <= 5
streamed = client.completions.create(model=model, prompt="once upon a time", max_tokens=5, temperature=0, stream=True)
assert "".join(c.choices[0].text for c in streamed) == completion.choices[0].text

seeded = [client.chat.completions.create(model=model, messages=messages, max_tokens=8, temperature=1, seed=7)
          .choices[0].message.content for _ in range(2)]
assert seeded[0] == seeded[1], seeded

stopped = client.chat.completions.create(model=model, messages=messages, max_tokens=12, temperature=0, stop=whole[2:4])
assert whole[2:4] not in stopped.choices[0].message.content and stopped.choices[0].finish_reason == "stop"

for call, error in (
        (lambda: client.chat.completions.create(model="no-such-model", messages=messages), openai.NotFoundError),
        (lambda: client.chat.completions.create(model=model, messages=messages, temperature=9), openai.BadRequestError),
        (lambda: client.chat.completions.create(model=model, messages=[]), openai.BadRequestError)):
    try:
        call()
    except error as e:
        assert e.body and "message" in e.body, e.body
        assert "x-pd-bridge" in e.response.headers
    else:
        raise AssertionError(f"no {error.__name__}")

print(f"openai {openai.__version__}: ok")
