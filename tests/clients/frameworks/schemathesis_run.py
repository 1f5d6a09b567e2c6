"""Schemathesis against `/openapi.json`: no 5xx, answers as the document describes them, and what it describes is taken.

usage: frameworks.sh schemathesis_run.py '{"url": "http://HOST:PORT", "examples": N, "seed": N}'

Not among the checks: `negative_data_rejection`. The document describes what is certainly taken; the gateway takes more,
unknown fields among it.
"""

import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from importlib.metadata import version

here = pathlib.Path(__file__).resolve().parent
given = json.loads(sys.argv[1])
CHECKS = ("not_a_server_error,status_code_conformance,content_type_conformance,response_headers_conformance,"
          "response_schema_conformance,positive_data_acceptance,unsupported_method,missing_required_header")

with tempfile.TemporaryDirectory() as folder:
    command = [sys.executable, "-m", "schemathesis.cli", "run", given["url"] + "/openapi.json", "--no-color",
               "--seed", str(given["seed"]), "--max-examples", str(given["examples"]), "--phases", "coverage,fuzzing",
               "--checks", CHECKS, "--workers", "2", "--request-timeout", "20", "--output-truncate", "false",
               "--output-sanitize", "false", "--continue-on-failure"]
    done = subprocess.run(command, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          env={**os.environ, "SCHEMATHESIS_HOOKS": str(here / "schemathesis_hooks.py")})
cases = re.search(r"(\d+) generated", done.stdout)
operations = re.search(r"Tested: (\d+)", done.stdout)
assert done.returncode == 0 and cases and operations, done.stdout
assert int(cases[1]) >= 200, done.stdout
assert int(operations[1]) >= 11, done.stdout
print(json.dumps({"client": f"schemathesis {version('schemathesis')}", "cases": int(cases[1]), "operations": int(operations[1])}))
