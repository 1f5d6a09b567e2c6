"""llm-comply, both of its suites for OpenAI's API, as a judge: every test passes but those named here.

usage: frameworks.sh llm_comply_run.py DOORS   (JSON, see common.py)
"""

import json
import pathlib
import subprocess
import sys
from importlib.metadata import version

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import openai

from common import doors, report

# Name of a test, and the one thing about it that must be wrong.
EXPECTED = {
    "open-responses": {
        "image-input": "HTTP 400",    # a text model says so
        "error-handling": "HTTP 200",  # `model` may be left out: there is one
    },
    "openai-chat": {"chat-image-input": "HTTP 400", "chat-error-handling": "HTTP 200"},
}
# Skipped by the suites themselves for names like ours, and an endpoint that nobody but OpenAI has: its tests take a 404.
SKIPPED = {"reasoning-summary", "chat-reasoning-summary"}

model = openai.OpenAI(base_url=doors["scripted"], api_key="none").models.list().data[0].id
took_ms = {}
for suite, expected in EXPECTED.items():
    command = [sys.executable, "-m", "llm_comply.cli", "-u", doors["scripted"], "-k", "none", "-m", model,
               "--format", suite, "--timeout", "30", "--json"]
    out = subprocess.run(command, stdout=subprocess.PIPE, text=True).stdout
    results = json.loads(out)["results"]
    assert len(results) >= 9, out
    for result in results:
        name, errors = result["id"], result.get("errors", [])
        if name in expected:
            assert result["status"] == "failed" and errors[0].startswith(expected[name]), result
        else:
            assert result["status"] == ("skipped" if name in SKIPPED else "passed"), result
    took_ms[suite] = round(sum(result.get("duration_ms", 0) for result in results))
report(f"llm-comply {version('llm-comply')}", 0, took_ms)
