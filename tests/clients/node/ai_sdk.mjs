// Vercel's AI SDK with its provider for OpenAI-compatible servers, as a judge.
//
// usage: node.sh ai_sdk.mjs DOORS   (JSON, see common.mjs)

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, Output, generateObject, generateText, isStepCount, streamObject, streamText, tool } from "ai";
import { z } from "zod";
import { CALLS, GREETING, OBJECT, THOUGHT, TOLD, collect, doors, fails, noting, play, question, verdict } from "./common.mjs";

globalThis.AI_SDK_LOG_WARNINGS = false;
const connect = (baseURL, more = {}) =>
  createOpenAICompatible({ name: "pd", baseURL, includeUsage: true, supportsStructuredOutputs: true, ...more });
const named = async (base) => (await (await fetch(`${base}/models`)).json()).data[0].id;
const model = await named(doors.real);
const theirs = await named(doors.scripted);
const real = connect(doors.real)(model);
const scripted = connect(doors.scripted)(theirs);
const City = z.object({ city: z.string(), degrees: z.number().int(), tags: z.array(z.string()) });
const [{ content: instructions }, asked] = question;
const bytes = Buffer.byteLength(GREETING);
let cancelled = 0;

async function text() {
  const ask = { model: real, instructions, messages: [asked], maxOutputTokens: 8, temperature: 0, maxRetries: 0 };
  const whole = await generateText({ ...ask, headers: { "X-PD-Bridge-Route": "bridge" } });
  const told = verdict(whole.response.headers["x-pd-bridge"]);
  assert.ok(["complete", "warm"].includes(told.verdict), told.verdict);
  assert.deepEqual([whole.usage.inputTokens, whole.usage.outputTokens, whole.finishReason], [told.prompt_tokens, 8, "length"]);
  assert.equal(whole.usage.inputTokenDetails.cacheReadTokens, told.cached_tokens);
  const streamed = streamText(ask);
  assert.equal((await collect(streamed.textStream)).join(""), whole.text);
  assert.deepEqual([(await streamed.usage).outputTokens, (await streamed.usage).inputTokens], [8, told.prompt_tokens]);
  assert.equal(await streamed.finishReason, "length");

  const greeting = await generateText({ model: scripted, messages: play("greet") });
  assert.deepEqual([greeting.text, greeting.finishReason, greeting.usage.outputTokens], [GREETING, "stop", bytes]);
  const letters = streamText({ model: scripted, messages: play("greet") });
  const pieces = await collect(letters.textStream);
  assert.equal(pieces.join(""), GREETING);
  assert.ok(pieces.length > 10 && (await letters.usage).outputTokens === bytes);
}

async function thoughts() {
  const whole = await generateText({ model: scripted, messages: play("think") });
  assert.deepEqual([whole.reasoningText, whole.text], [THOUGHT, "42"]);
  const streamed = streamText({ model: scripted, messages: play("think") });
  const parts = await collect(streamed.stream);
  assert.equal(parts.filter((p) => p.type === "reasoning-delta").map((p) => p.text).join(""), THOUGHT);
  assert.deepEqual([await streamed.reasoningText, await streamed.text], [THOUGHT, "42"]);
}

async function tools() {
  const done = [];
  const weather = tool({
    description: "The weather of a city", inputSchema: z.object({ city: z.string(), days: z.number().int() }),
    execute: ({ city, days }) => {
      done.push({ city, days });
      return `rain in ${city}`;
    },
  });
  const ask = { model: scripted, messages: play("weather"), tools: { weather } };
  const once = await generateText(ask);
  assert.equal(once.finishReason, "tool-calls");
  assert.equal(once.text, "Let me see.\n");
  assert.deepEqual(once.toolCalls.map((c) => [c.toolName, c.input]), CALLS.map((call) => ["weather", call]));
  for (const run of [generateText, streamText]) {
    done.length = 0;
    const result = run({ ...ask, stopWhen: isStepCount(3) });
    const steps = await (run === generateText ? result.then((r) => r.steps) : collect(result.stream).then(() => result.steps));
    assert.deepEqual(steps.map((s) => s.finishReason), ["tool-calls", "stop"]);
    assert.equal(steps[1].text, TOLD);
    assert.deepEqual(done, CALLS);
  }
  const deltas = (await collect(streamText(ask).stream)).filter((p) => p.type === "tool-input-delta");
  const ids = [...new Set(deltas.map((d) => d.id))];
  const joined = ids.map((id) => deltas.filter((d) => d.id === id).map((d) => d.delta).join(""));
  assert.deepEqual(joined.map(JSON.parse), CALLS);
  assert.ok(deltas.length > 6, "arguments come in pieces");

  // The real model is forced by a grammar, so that whatever it calls can be parsed.
  const pick = tool({ inputSchema: z.object({ fruit: z.enum(["apple", "pear"]) }) });
  const forced = await generateText({ model: real, instructions, messages: [asked], tools: { pick }, maxOutputTokens: 60,
    temperature: 0, toolChoice: { type: "tool", toolName: "pick" }, providerOptions: { pd: { parallel_tool_calls: false } } });
  assert.equal(forced.finishReason, "tool-calls");
  assert.ok(["apple", "pear"].includes(forced.toolCalls[0].input.fruit));
}

async function objects() {
  const ask = { model: scripted, schema: City, messages: play("object") };
  const whole = await generateObject(ask);
  assert.deepEqual([whole.object, whole.finishReason], [OBJECT, "stop"]);
  const streamed = streamObject(ask);
  const states = await collect(streamed.partialObjectStream);
  assert.deepEqual(states.at(-1), OBJECT);
  assert.deepEqual(await streamed.object, OBJECT);
  assert.ok(states.length > 3, "it grows");
  const output = await generateText({ model: scripted, messages: play("object"), output: Output.object({ schema: City }) });
  assert.deepEqual(output.output, OBJECT);
  const Fruit = z.object({ fruit: z.enum(["apple", "pear"]), ripe: z.boolean() });
  const forced = await generateObject({ model: real, schema: Fruit, instructions, messages: [asked], maxOutputTokens: 60, temperature: 0 });
  assert.ok(Fruit.safeParse(forced.object).success && forced.finishReason === "stop", forced.object);
}

async function errors() {
  for (const [provider, more, status, code] of [
    [connect(doors.real)("no-such-model"), {}, 404, "model_not_found"],
    [real, { temperature: 9 }, 400, "invalid_value"],
    [real, { messages: [{ role: "user", content: [{ type: "image", image: new URL("http://127.0.0.1/x.png"), mediaType: "image/png" }] }] }, 400, "unsupported_value"],
    [connect(doors.guarded)(theirs), {}, 401, "invalid_api_key"],
  ]) {
    const download = async (urls) => urls.map(() => null);
    const error = await fails(generateText({ model: provider, messages: [asked], maxRetries: 0, experimental_download: download, ...more }), APICallError);
    assert.deepEqual([error.statusCode, error.data.error.code], [status, code], error.message);
    assert.equal(error.message, error.data.error.message);
    verdict(error.responseHeaders["x-pd-bridge"]);
  }
}

async function cancels() {
  const controller = new AbortController();
  const streamed = streamText({ model: scripted, messages: play("long"), abortSignal: controller.signal });
  let seen = 0;
  for await (const part of streamed.stream) {
    if (part.type === "text-delta" && ++seen === 3) controller.abort();
  }
  assert.ok(seen >= 3 && seen < 100, `${seen} pieces`);
  cancelled += 1;
  const error = await generateText({ model: scripted, messages: play("long"), abortSignal: AbortSignal.timeout(200) }).then(() => null, (e) => e);
  assert.match(`${error?.name}`, /Abort|Timeout/);
  cancelled += 1;
}

async function retries() {
  const holder = new AbortController();
  const keyed = (more) => connect(doors.guarded, { apiKey: doors.key, ...more })(theirs);
  const held = streamText({ model: keyed(), messages: play("long"), abortSignal: holder.signal, onError: () => {} }).stream[Symbol.asyncIterator]();
  while ((await held.next()).value.type !== "text-delta");
  const guarded = noting();
  const release = async (url, init) => {
    const response = await guarded.fetch(url, init);
    if (response.status === 429) holder.abort();
    return response;
  };
  const answer = await generateText({ model: keyed({ fetch: release }), messages: play("greet"), maxRetries: 2 });
  cancelled += 1;
  assert.equal(answer.text, GREETING);
  assert.deepEqual(guarded.seen.map((s) => s.status), [429, 200]);
  const late = noting();
  const came = await generateText({ model: connect(doors.late, { fetch: late.fetch })(theirs), messages: play("greet"), maxRetries: 12 });
  assert.equal(came.text, GREETING);
  const statuses = late.seen.map((s) => s.status);
  assert.ok(statuses.length >= 2 && statuses.at(-1) === 200 && statuses.slice(0, -1).every((s) => s === 503), statuses);
}

const took_ms = {};
for (const check of [text, thoughts, tools, objects, errors, cancels, retries]) {
  const begun = Date.now();
  await check();
  took_ms[check.name] = Date.now() - begun;
}
const { dependencies } = JSON.parse(readFileSync(new URL("package.json", import.meta.url)));
const client = `ai ${dependencies.ai}, @ai-sdk/openai-compatible ${dependencies["@ai-sdk/openai-compatible"]}`;
console.log(JSON.stringify({ client, cancelled, took_ms }));
