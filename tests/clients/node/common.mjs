// What the scripts share: the doors they judge and small helpers.

import assert from "node:assert/strict";
import { basename } from "node:path";

/** Base URLs `real`, `scripted`, `guarded` (with `key`) and `late`. */
export const doors = JSON.parse(process.argv[2] ?? "{}");

/** One of each script's own, so that no script finds what another one has left in a cache. */
export const question = [
  { role: "system", content: `You are ${basename(process.argv[1])}.` },
  { role: "user", content: "Say something about rain. ".repeat(6) },
];
export const play = (name) => [{ role: "user", content: `play: ${name}` }];

export const GREETING = "Grüße aus Köln! 🌧 Bis bald.";
export const THOUGHT = "6 × 7, let me count\n";
export const OBJECT = { city: "Köln", degrees: -3, tags: ["wet", "cold"] };
export const CALLS = [{ city: "Köln", days: 2 }, { city: "Bonn", days: 1 }];
export const TOLD = "I was told: rain in Köln, rain in Bonn";

/** A fetch that notes the status and the verdict header of every answer. */
export function noting() {
  const seen = [];
  const noted = async (url, init) => {
    const response = await fetch(url, init);
    seen.push({ status: response.status, verdict: response.headers.get("x-pd-bridge") });
    return response;
  };
  return { seen, fetch: noted };
}

/** The parsed verdict header, which every answer of an inference endpoint has. */
export function verdict(text) {
  assert.ok(text, "no X-PD-Bridge header");
  const verdict = JSON.parse(text);
  assert.match(verdict.request_id, /^req-/);
  return verdict;
}

export async function collect(iterable) {
  const all = [];
  for await (const item of iterable) all.push(item);
  return all;
}

/** Awaits an error of a class and returns it. */
export async function fails(promise, kind) {
  const error = await promise.then(() => null, (error) => error);
  assert.ok(error, `no ${kind.name}`);
  assert.ok(error instanceof kind, `${error?.constructor?.name} is no ${kind.name}: ${error}`);
  return error;
}
