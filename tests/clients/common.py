"""What the Python scripts share: the doors they judge and small helpers."""

import json
import sys

# Base URLs `real`, `scripted`, `guarded` (with `key`) and `late`.
doors = json.loads(sys.argv[1])
# One of each script's own, so that no script finds what another one has left in a cache.
question = [{"role": "system", "content": f"You are {sys.argv[0].rsplit('/', 1)[-1]}."},
            {"role": "user", "content": "Say something about rain. " * 6}]

GREETING = "Grüße aus Köln! 🌧 Bis bald."
THOUGHT = "6 × 7, let me count\n"
OBJECT = {"city": "Köln", "degrees": -3, "tags": ["wet", "cold"]}
CALLS = [{"city": "Köln", "days": 2}, {"city": "Bonn", "days": 1}]
TOLD = "I was told: rain in Köln, rain in Bonn"
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
           "required": ["city", "days"], "additionalProperties": False}


def play(name):
    return [{"role": "user", "content": f"play: {name}"}]


def verdict(headers):
    """The verdict header, which every answer of an inference endpoint has."""
    verdict = json.loads(headers["x-pd-bridge"])
    assert verdict["request_id"].startswith("req-"), verdict
    return verdict


def fails(call, kind):
    """The error that a call must raise."""
    try:
        got = call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__} but {got}")


def report(client, cancelled, took_ms):
    """The last line: who judged, how many answers of the scripted worker it left, how long each check took."""
    print(json.dumps({"client": client, "cancelled": cancelled, "took_ms": took_ms}))
