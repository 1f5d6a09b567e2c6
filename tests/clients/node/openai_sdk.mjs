// The official OpenAI SDK for Node as a judge: what it parses is what clients get.
//
// usage: node.sh openai_sdk.mjs DOORS   (JSON, see common.mjs)

import assert from "node:assert/strict";
import OpenAI from "openai";
import { VERSION } from "openai/version";
import { zodFunction, zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";
import { CALLS, GREETING, OBJECT, THOUGHT, TOLD, collect, doors, fails, noting, play, question, verdict } from "./common.mjs";

const connect = (baseURL, more = {}) => new OpenAI({ baseURL, apiKey: "none", maxRetries: 0, timeout: 120_000, ...more });
const real = connect(doors.real);
const scripted = connect(doors.scripted);
const City = z.object({ city: z.string(), degrees: z.number().int(), tags: z.array(z.string()) });
const Weather = z.object({ city: z.string(), days: z.number().int() });
let cancelled = 0;

const models = await collect(await real.models.list());
const model = models[0].id;
assert.equal((await real.models.retrieve(model)).id, model);
const theirs = (await collect(await scripted.models.list()))[0].id;

async function chat() {
  const ask = { model, messages: question, max_tokens: 8, temperature: 0 };
  const { data: answer, response } = await real.chat.completions.create(ask, { headers: { "X-PD-Bridge-Route": "bridge" } }).withResponse();
  const told = verdict(response.headers.get("x-pd-bridge"));
  assert.ok(["complete", "warm"].includes(told.verdict), told.verdict);
  assert.equal(told.cached_tokens, told.prompt_tokens - 1);
  assert.equal(answer.usage.prompt_tokens, told.prompt_tokens);
  assert.equal(answer.usage.prompt_tokens_details.cached_tokens, told.cached_tokens);
  assert.equal(answer.usage.total_tokens, answer.usage.prompt_tokens + answer.usage.completion_tokens);
  assert.equal(answer.usage.completion_tokens, 8);
  assert.equal(answer.choices[0].finish_reason, "length");
  const whole = answer.choices[0].message.content;
  assert.ok(whole.length > 0);

  const chunks = await collect(await real.chat.completions.create({ ...ask, stream: true, stream_options: { include_usage: true } }));
  assert.equal(chunks.map((c) => c.choices[0]?.delta.content ?? "").join(""), whole);
  assert.equal(chunks[0].choices[0].delta.role, "assistant");
  assert.deepEqual(chunks.map((c) => c.choices[0]?.finish_reason).filter(Boolean), ["length"]);
  assert.deepEqual(chunks.at(-1).choices, []);
  assert.equal(chunks.at(-1).usage.completion_tokens, 8);
  assert.equal(chunks.at(-1).usage.prompt_tokens, told.prompt_tokens);
  assert.equal(new Set(chunks.map((c) => c.id)).size, 1);

  const helper = real.chat.completions.stream(ask);
  const pieces = [];
  helper.on("content", (piece) => pieces.push(piece));
  assert.equal(await helper.finalContent(), whole);
  assert.equal(pieces.join(""), whole);

  const completion = { model, prompt: "once upon a time", max_tokens: 4, temperature: 0 };
  const text = await real.completions.create(completion);
  assert.equal(text.usage.completion_tokens, 4);
  const parts = await collect(await real.completions.create({ ...completion, stream: true }));
  assert.equal(parts.map((c) => c.choices[0].text).join(""), text.choices[0].text);

  const greeting = await scripted.chat.completions.create({ model: theirs, messages: play("greet") });
  assert.equal(greeting.choices[0].message.content, GREETING);
  assert.equal(greeting.choices[0].finish_reason, "stop");
  assert.equal(greeting.usage.completion_tokens, Buffer.byteLength(GREETING));
  const letters = await collect(await scripted.chat.completions.create({ model: theirs, messages: play("greet"), stream: true }));
  assert.equal(letters.map((c) => c.choices[0].delta.content ?? "").join(""), GREETING);
  assert.ok(letters.length > 20, "it comes in pieces");

  const thought = await scripted.chat.completions.create({ model: theirs, messages: play("think") });
  assert.equal(thought.choices[0].message.reasoning_content, THOUGHT);
  assert.equal(thought.choices[0].message.reasoning, THOUGHT);
  assert.equal(thought.choices[0].message.content, "42");
}

async function tools() {
  const asked = [];
  const weather = (done) => ({
    type: "function",
    function: {
      name: "weather", description: "The weather of a city", parse: JSON.parse,
      parameters: { type: "object", properties: { city: { type: "string" }, days: { type: "integer" } }, required: ["city", "days"] },
      function: ({ city, days }) => {
        done.push({ city, days });
        return `rain in ${city}`;
      },
    },
  });
  const { parse, function: _, ...declared } = weather(asked).function;
  const body = { model: theirs, messages: play("weather"), tools: [{ type: "function", function: declared }] };
  const whole = await scripted.chat.completions.create(body);
  const choice = whole.choices[0];
  assert.equal(choice.finish_reason, "tool_calls");
  assert.equal(choice.message.content, "Let me see.\n");
  assert.deepEqual(choice.message.tool_calls.map((c) => [c.type, c.function.name, JSON.parse(c.function.arguments)]),
    CALLS.map((call) => ["function", "weather", call]));

  const joined = [], deltas = [];
  let reason;
  for await (const chunk of await scripted.chat.completions.create({ ...body, stream: true })) {
    reason = chunk.choices[0].finish_reason ?? reason;
    for (const call of chunk.choices[0].delta.tool_calls ?? []) {
      if (call.id) joined[call.index] = { id: call.id, name: call.function.name, arguments: "" };
      joined[call.index].arguments += call.function.arguments;
      if (call.function.arguments) deltas.push(call.function.arguments);
    }
  }
  assert.equal(reason, "tool_calls");
  assert.deepEqual(joined.map((c) => c.arguments), choice.message.tool_calls.map((c) => c.function.arguments));
  assert.ok(deltas.length > 6, `arguments come in pieces: ${deltas}`);
  assert.equal(new Set(joined.map((c) => c.id)).size, 2);

  const stream = scripted.chat.completions.stream(body);
  const done = [];
  stream.on("tool_calls.function.arguments.done", (call) => done.push(call.arguments));
  const finished = await stream.finalChatCompletion();
  assert.deepEqual(done.map(JSON.parse), CALLS);
  assert.deepEqual(finished.choices[0].message.tool_calls.map((c) => JSON.parse(c.function.arguments)), CALLS);

  for (const stream of [false, true]) {
    asked.length = 0;
    const runner = scripted.chat.completions.runTools({ model: theirs, messages: play("weather"), tools: [weather(asked)], stream });
    assert.equal(await runner.finalContent(), TOLD);
    assert.deepEqual(asked, CALLS);
  }

  const parsed = await scripted.chat.completions.parse({
    model: theirs, messages: play("weather"), tool_choice: "required", tools: [zodFunction({ name: "weather", parameters: Weather })],
  });
  assert.deepEqual(parsed.choices[0].message.tool_calls.map((c) => c.function.parsed_arguments), CALLS);

  // The real model is forced by a grammar, so that whatever it calls can be parsed.
  const forced = await real.chat.completions.parse({
    model, messages: question, max_tokens: 60, temperature: 0, parallel_tool_calls: false,
    tool_choice: { type: "function", function: { name: "pick" } },
    tools: [zodFunction({ name: "pick", parameters: z.object({ fruit: z.enum(["apple", "pear"]) }) })],
  });
  assert.equal(forced.choices[0].finish_reason, "tool_calls");
  assert.ok(["apple", "pear"].includes(forced.choices[0].message.tool_calls[0].function.parsed_arguments.fruit));
}

async function structured() {
  const format = zodResponseFormat(City, "city");
  const parsed = await scripted.chat.completions.parse({ model: theirs, messages: play("object"), response_format: format });
  assert.deepEqual(parsed.choices[0].message.parsed, OBJECT);
  const stream = scripted.chat.completions.stream({ model: theirs, messages: play("object"), response_format: format });
  assert.deepEqual((await stream.finalChatCompletion()).choices[0].message.parsed, OBJECT);
  const Fruit = z.object({ fruit: z.enum(["apple", "pear"]), ripe: z.boolean() });
  const forced = await real.chat.completions.parse({
    model, messages: question, max_tokens: 60, temperature: 0, response_format: zodResponseFormat(Fruit, "fruit"),
  });
  assert.equal(forced.choices[0].finish_reason, "stop");
  assert.ok(Fruit.safeParse(forced.choices[0].message.parsed).success, forced.choices[0].message.content);
}

async function responses() {
  const ask = { model, input: question, max_output_tokens: 6, temperature: 0 };
  const { data: answer, response } = await real.responses.create(ask).withResponse();
  verdict(response.headers.get("x-pd-bridge"));
  assert.equal(answer.status, "incomplete");
  assert.equal(answer.incomplete_details.reason, "max_output_tokens");
  assert.equal(answer.usage.output_tokens, 6);
  assert.ok(answer.output_text.length > 0);
  const events = await collect(await real.responses.create({ ...ask, stream: true }));
  assert.deepEqual(events.map((e) => e.sequence_number), events.map((_, i) => i));
  assert.equal(events[0].type, "response.created");
  assert.equal(events.at(-1).type, "response.incomplete");
  assert.equal(events.filter((e) => e.type === "response.output_text.delta").map((e) => e.delta).join(""), answer.output_text);

  const helper = scripted.responses.stream({ model: theirs, input: "play: greet" });
  const types = (await collect(helper)).map((e) => e.type);
  const final = await helper.finalResponse();
  assert.equal(final.output_text, GREETING);
  assert.equal(final.status, "completed");
  assert.equal(final.usage.output_tokens, Buffer.byteLength(GREETING));
  assert.equal(types.at(-1), "response.completed");

  const parsed = await scripted.responses.parse({ model: theirs, input: "play: object", text: { format: zodTextFormat(City, "city") } });
  assert.deepEqual(parsed.output_parsed, OBJECT);

  const tool = { type: "function", name: "weather", strict: false,
    parameters: { type: "object", properties: { city: { type: "string" }, days: { type: "integer" } } } };
  const calling = scripted.responses.stream({ model: theirs, input: "play: weather", tools: [tool] });
  const calls = (await calling.finalResponse()).output.filter((item) => item.type === "function_call");
  assert.deepEqual(calls.map((c) => [c.name, JSON.parse(c.arguments)]), CALLS.map((call) => ["weather", call]));
  const results = calls.map((c) => ({ type: "function_call_output", call_id: c.call_id, output: `rain in ${JSON.parse(c.arguments).city}` }));
  const told = await scripted.responses.create({ model: theirs, input: [...play("weather"), ...calls, ...results], tools: [tool] });
  assert.equal(told.output_text, TOLD);

  const thought = await scripted.responses.create({ model: theirs, input: "play: think" });
  assert.deepEqual(thought.output.map((item) => item.type), ["reasoning", "message"]);
  assert.equal(thought.output[0].content[0].text, THOUGHT);
  assert.equal(thought.output_text, "42");
}

async function errors() {
  for (const [call, kind, status, code, param] of [
    [() => real.chat.completions.create({ model: "no-such-model", messages: question }), OpenAI.NotFoundError, 404, "model_not_found", "model"],
    [() => real.chat.completions.create({ model, messages: question, temperature: 9 }), OpenAI.BadRequestError, 400, "invalid_value", "temperature"],
    [() => real.chat.completions.create({ model, messages: [] }), OpenAI.BadRequestError, 400, "invalid_value", "messages"],
    [() => real.responses.create({ model, input: "x", previous_response_id: "resp_1" }), OpenAI.BadRequestError, 400, "unsupported_value", "previous_response_id"],
    [() => real.chat.completions.create({ model, messages: [{ role: "user", content: [{ type: "image_url", image_url: { url: "http://127.0.0.1/x.png" } }] }] }),
      OpenAI.BadRequestError, 400, "unsupported_value", "messages[0].content[0]"],
    [() => connect(doors.guarded).chat.completions.create({ model: theirs, messages: play("greet") }), OpenAI.AuthenticationError, 401, "invalid_api_key", null],
    [() => real.models.retrieve("no-such-model"), OpenAI.NotFoundError, 404, "model_not_found", "model"],
  ]) {
    const error = await fails(call(), kind);
    assert.deepEqual([error.status, error.code, error.param], [status, code, param]);
    assert.ok(error.error.message && error.type, JSON.stringify(error.error));
    if (!call.toString().includes("retrieve")) verdict(error.headers.get("x-pd-bridge"));
  }
}

async function cancels() {
  const body = { model: theirs, messages: play("long"), stream: true };
  const stream = await scripted.chat.completions.create(body);
  let seen = 0;
  for await (const chunk of stream) {
    seen += chunk.choices[0].delta.content ? 1 : 0;
    if (seen === 3) break;
  }
  cancelled += 1;
  const controller = new AbortController();
  const aborted = await scripted.chat.completions.create(body, { signal: controller.signal });
  seen = 0;
  for await (const _ of aborted) {
    seen += 1;
    if (seen === 3) controller.abort();
  }
  assert.ok(seen < 100, `${seen} chunks after an abort`);
  cancelled += 1;
  const whole = new AbortController();
  setTimeout(() => whole.abort(), 150);
  await fails(scripted.chat.completions.create({ ...body, stream: false }, { signal: whole.signal }), OpenAI.APIUserAbortError);
  cancelled += 1;
  await fails(scripted.responses.create({ model: theirs, input: "play: long" }, { timeout: 200 }), OpenAI.APIConnectionTimeoutError);
  cancelled += 1;
}

async function retries() {
  // One request at a time is this key's limit: the second is refused until the first is gone.
  const first = await connect(doors.guarded, { apiKey: doors.key }).chat.completions.create({ model: theirs, messages: play("long"), stream: true });
  const reader = first[Symbol.asyncIterator]();
  await reader.next();
  const guarded = noting();
  const release = async (url, init) => {
    const response = await guarded.fetch(url, init);
    if (response.status === 429) first.controller.abort();
    return response;
  };
  const refused = await fails(connect(doors.guarded, { apiKey: doors.key }).chat.completions.create({ model: theirs, messages: play("greet") }), OpenAI.RateLimitError);
  assert.equal(refused.type, "rate_limit_error");
  assert.ok(Number(refused.headers.get("retry-after")) >= 1);
  const patient = connect(doors.guarded, { apiKey: doors.key, maxRetries: 3, fetch: release });
  const answer = await patient.chat.completions.create({ model: theirs, messages: play("greet") });
  cancelled += 1;
  assert.equal(answer.choices[0].message.content, GREETING);
  assert.deepEqual(guarded.seen.map((s) => s.status), [429, 200]);
  guarded.seen.forEach((s) => verdict(s.verdict));

  const late = noting();
  const waiting = connect(doors.late, { maxRetries: 12, fetch: late.fetch });
  const came = await waiting.chat.completions.create({ model: theirs, messages: play("greet") });
  assert.equal(came.choices[0].message.content, GREETING);
  const statuses = late.seen.map((s) => s.status);
  assert.ok(statuses.length >= 2 && statuses.at(-1) === 200 && statuses.slice(0, -1).every((s) => s === 503), statuses);
}

const took_ms = {};
for (const check of [chat, tools, structured, responses, errors, cancels, retries]) {
  const begun = Date.now();
  await check();
  took_ms[check.name] = Date.now() - begun;
}
console.log(JSON.stringify({ client: `openai (Node) ${VERSION}`, cancelled, took_ms }));
