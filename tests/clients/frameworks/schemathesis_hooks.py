"""What a schema cannot say about a request.

- Answers are kept a few tokens long: the schema allows any number, and what is judged is an answer's form.
- A call that `tool_choice` forces must be of a tool that is there.
- Few tools, so that the prompt stays within what the model takes.
- X-PD-Bridge-Require is what asks for a 503 where no bridge is possible; tests of its own judge that.

Values that the schema forbids stay as they are.
"""

import schemathesis

MOST = 4
LARGEST = 2**32 - 1
FEW_TOOLS, MOST_TOOLS = 3, 512
LIMITS = {"/v1/chat/completions": ("max_completion_tokens", "max_tokens"), "/v1/completions": ("max_tokens",),
          "/v1/responses": ("max_output_tokens",)}


def is_long(value):
    return value is None or type(value) in (int, float) and MOST < value <= LARGEST


@schemathesis.hook
def before_call(context, case, kwargs):
    if case.headers:
        case.headers.pop("X-PD-Bridge-Require", None)
    body = case.body
    if not isinstance(body, dict):
        return
    for name in LIMITS.get(case.operation.path, ()):
        if is_long(body.get(name)):
            body[name] = MOST
    tools = body.get("tools")
    if isinstance(tools, list) and len(tools) <= MOST_TOOLS:
        del tools[FEW_TOOLS:]
    choice = body.get("tool_choice")
    function = choice.get("function") if isinstance(choice, dict) else None
    if isinstance(function, dict) and isinstance(function.get("name"), str):
        if tools is None:
            tools = body["tools"] = []
        if not isinstance(tools, list):
            return
        if function["name"] not in [tool.get("function", {}).get("name") for tool in tools if isinstance(tool, dict)
                                    and isinstance(tool.get("function"), dict)]:
            tools.append({"type": "function", "function": {"name": function["name"]}})
