// The live page: keeps a copy of the gateway's table of requests from a WebSocket, and draws it.
"use strict";

const RECENT_LIMIT = 100;
const RECONNECT_MIN_MS = 500;
const RECONNECT_MAX_MS = 10000;
const SILENCE_LIMIT_MS = 8000;
const RATE_WINDOW_MS = 5000;
const BRIDGED = new Set(["complete", "partial"]);

const state = {
  requests: new Map(), // id + began_ms -> request, with `seen_ms`, the local time at which its age was true
  nodes: [],
  totals: { in_flight: 0, completion_tokens: 0 },
  samples: [], // [local ms, completion tokens]
  open: new Set(), // keys of requests whose details are open
  paused: false,
  filter: "",
};

const $ = (id) => document.getElementById(id);

// ---- connection -----------------------------------------------------------------------------------------------

let retry_ms = RECONNECT_MIN_MS;
let last_message_ms = 0;
let socket = null;

function connect() {
  const scheme = location.protocol === "https:" ? "wss:" : "ws:";
  socket = new WebSocket(`${scheme}//${location.host}/v1/bridge/events`);
  let fresh = true;
  socket.onmessage = (event) => {
    last_message_ms = performance.now();
    const message = JSON.parse(event.data);
    if (message.type === "hello") {
      $("model").textContent = message.model;
      return;
    }
    if (message.type !== "update") return;
    if (fresh) {
      // A new connection tells the whole table; what was known before may be another process's.
      state.requests.clear();
      state.samples = [];
      fresh = false;
      retry_ms = RECONNECT_MIN_MS;
    }
    link("live", "live");
    take(message);
  };
  socket.onclose = () => {
    link("lost", `connection lost, trying again in ${Math.round(retry_ms / 100) / 10} s`);
    setTimeout(connect, retry_ms * (0.75 + Math.random() / 2));
    retry_ms = Math.min(retry_ms * 2, RECONNECT_MAX_MS);
  };
}

function link(name, text) {
  if ($("link").textContent !== text) $("link").textContent = text;
  $("link").dataset.state = name;
}

setInterval(() => {
  if (socket && socket.readyState === WebSocket.OPEN && performance.now() - last_message_ms > SILENCE_LIMIT_MS) {
    socket.close();
  }
}, 1000);

function take(update) {
  const now = performance.now();
  state.totals = update.totals;
  if (update.nodes) state.nodes = update.nodes;
  state.samples.push([now, update.totals.completion_tokens]);
  while (state.samples.length > 2 && now - state.samples[0][0] > RATE_WINDOW_MS) state.samples.shift();
  for (const request of update.requests) {
    request.seen_ms = now;
    request.key = `${request.id} ${request.began_ms}`;
    state.requests.set(request.key, request);
  }
  forget();
}

function forget() {
  const ended = [...state.requests.values()].filter((r) => r.ending).sort((a, b) => b.began_ms - a.began_ms);
  for (const old of ended.slice(RECENT_LIMIT)) {
    state.requests.delete(old.key);
    state.open.delete(old.key);
  }
}

// ---- drawing --------------------------------------------------------------------------------------------------

function draw() {
  const all = [...state.requests.values()].sort((a, b) => b.began_ms - a.began_ms);
  const running = all.filter((r) => !r.ending);
  const ended = all.filter((r) => r.ending);
  tiles(ended);
  nodes();
  const scale = Math.max(1000, ...running.map(age));
  bars($("flight"), running, () => scale);
  $("no-flight").hidden = running.length > 0;
  if (!state.paused) {
    const shown = ended.filter((r) => !state.filter || verdict_name(r) === state.filter);
    bars($("recent"), shown, (r) => Math.max(1, end_of(r)));
    $("no-recent").hidden = shown.length > 0;
  }
}

function tiles(ended) {
  $("in-flight").textContent = state.totals.in_flight;
  $("tokens-per-s").textContent = rate().toFixed(1);
  const ttft = (wanted) => {
    const known = ended.filter((r) => r.verdict && r.verdict.ttft_ms !== undefined && wanted(r.verdict.verdict));
    return known.length ? duration(median(known.map((r) => r.verdict.ttft_ms))) : "–";
  };
  $("ttft-bridged").textContent = ttft((v) => BRIDGED.has(v));
  $("ttft-native").textContent = ttft((v) => v === "native");
  const judged = ended.filter((r) => r.verdict);
  const share = judged.filter((r) => BRIDGED.has(r.verdict.verdict)).length / judged.length;
  $("bridged-share").textContent = judged.length ? `${Math.round(share * 100)} %` : "–";
}

function rate() {
  if (state.samples.length < 2) return 0;
  const [from, to] = [state.samples[0], state.samples[state.samples.length - 1]];
  const seconds = (performance.now() - from[0]) / 1000;
  return seconds > 0 ? (to[1] - from[1]) / seconds : 0;
}

function nodes() {
  const text = (value) => (value === undefined || value === null ? "–" : String(value));
  const number = (value) => (value ? Math.round(value).toLocaleString("en") : "–");
  const rows = state.nodes.map((n) => {
    const rates = n.rates || {};
    const cells = [n.name || n.id, n.role, n.connected ? n.standing : `${n.standing}, not connected`, text(n.requests),
      number(rates.prefill_tokens_per_s), number(rates.decode_tokens_per_s), text(n.control_addr)];
    return cells.map((cell, i) => `<td${i === 4 || i === 5 ? ' class="n"' : ""}>${escape(cell)}</td>`).join("");
  });
  const html = rows.map((row) => `<tr>${row}</tr>`).join("");
  if ($("nodes").dataset.html !== html) {
    $("nodes").innerHTML = html;
    $("nodes").dataset.html = html;
  }
  $("no-nodes").hidden = rows.length > 0;
}

// Rows are kept from one drawing to the next, so that focus stays where it is.
function bars(box, requests, scale_of) {
  const known = new Map([...box.children].map((child) => [child.dataset.key, child]));
  let before = box.firstChild;
  for (const request of requests) {
    let bar = known.get(request.key);
    known.delete(request.key);
    if (!bar) bar = new_bar(request.key);
    if (bar === before) before = before.nextSibling;
    else box.insertBefore(bar, before);
    fill(bar, request, scale_of(request));
  }
  for (const gone of known.values()) {
    const held_focus = gone === document.activeElement;
    gone.remove();
    if (held_focus && box.firstChild) box.firstChild.focus();
  }
}

function new_bar(key) {
  const bar = document.createElement("div");
  bar.className = "bar";
  bar.tabIndex = 0;
  bar.dataset.key = key;
  bar.setAttribute("role", "button");
  bar.innerHTML = '<div class="line"><span class="id"></span><span class="size"></span><span class="what"></span></div>' +
    '<svg class="track" preserveAspectRatio="none" viewBox="0 0 1000 10" aria-hidden="true"></svg>';
  bar.addEventListener("click", () => toggle(key));
  return bar;
}

function fill(bar, r, scale) {
  const open = state.open.has(r.key);
  bar.dataset.stage = r.ending ? "ended" : r.stages[r.stages.length - 1].stage;
  bar.dataset.stages = r.stages.map((s) => s.stage).join(" ");
  bar.setAttribute("aria-expanded", String(open));
  put(bar.querySelector(".id"), escape(r.id));
  put(bar.querySelector(".size"), escape(`${r.prompt_tokens} → ${r.completion_tokens} tokens`));
  put(bar.querySelector(".what"), summary(r));
  put(bar.querySelector(".track"), r.stages.map((s) => rectangle(r, s, scale)).join(""));
  let detail = bar.querySelector(".detail");
  if (open && !detail) {
    detail = document.createElement("dl");
    detail.className = "detail";
    bar.append(detail);
  }
  if (!open && detail) detail.remove();
  if (open) put(detail, details(r));
}

function put(element, html) {
  if (element.dataset.html !== html) {
    element.innerHTML = html;
    element.dataset.html = html;
  }
}

function rectangle(r, span, scale) {
  const x = (span.start_ms / scale) * 1000;
  const end = span.end_ms === undefined ? age(r) : span.end_ms;
  const width = Math.max(0, ((end - span.start_ms) / scale) * 1000);
  const shape = `<rect class="${span.stage}" x="${x.toFixed(1)}" y="0" width="${Math.max(1, width).toFixed(1)}" height="10"/>`;
  const reading = span.end_ms === undefined && (span.stage === "prefill" || span.stage === "native");
  if (!reading || !r.prompt_tokens) return shape;
  const read = (width * r.done_tokens) / r.prompt_tokens;
  return shape + `<rect class="read" x="${x.toFixed(1)}" y="7" width="${read.toFixed(1)}" height="3"/>`;
}

function summary(r) {
  if (r.ending) {
    const name = verdict_name(r);
    const reason = r.verdict && r.verdict.reason ? ` <span class="reason">${escape(r.verdict.reason)}</span>` : "";
    const ending = r.ending === "answered" ? "" : ` <span class="ended-${r.ending}">${r.ending === "left" ? "client left" : "error"}</span>`;
    return `<span class="verdict" data-verdict="${escape(name)}">${escape(name || "–")}</span>${reason}${ending} ${duration(end_of(r))}`;
  }
  const stage = r.stages[r.stages.length - 1].stage;
  const progress = stage === "prefill" || stage === "native" ? ` ${r.done_tokens}/${r.prompt_tokens}` : "";
  const name = r.verdict ? `<span class="verdict" data-verdict="${escape(r.verdict.verdict)}">${escape(r.verdict.verdict)}</span> ` : "";
  return `${name}${stage}${progress} ${duration(age(r))}`;
}

function details(r) {
  const rows = [["began", new Date(r.began_ms).toLocaleTimeString()], ["prefill worker", r.prefill], ["decode worker", r.decode]];
  for (const s of r.stages) rows.push([s.stage, duration((s.end_ms === undefined ? age(r) : s.end_ms) - s.start_ms)]);
  for (const [name, value] of Object.entries(r.verdict || {})) rows.push([name.replaceAll("_", " "), round(value)]);
  return rows.filter(([, value]) => value !== undefined && value !== null)
    .map(([name, value]) => `<dt>${escape(name)}</dt><dd>${escape(String(value))}</dd>`).join("");
}

const verdict_name = (r) => (r.verdict ? r.verdict.verdict : "");
const age = (r) => (r.ending ? r.age_ms : r.age_ms + (performance.now() - r.seen_ms));
const end_of = (r) => Math.max(...r.stages.map((s) => s.end_ms ?? r.age_ms));
const round = (value) => (typeof value === "number" ? Math.round(value * 100) / 100 : value);

function duration(ms) {
  return ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(ms < 10000 ? 2 : 1)} s`;
}

function median(values) {
  const sorted = [...values].sort((a, b) => a - b);
  const middle = Math.floor(sorted.length / 2);
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

function escape(text) {
  return text.replace(/[&<>"']/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" })[c]);
}

// ---- hands ----------------------------------------------------------------------------------------------------

function toggle(key) {
  if (!state.open.delete(key)) state.open.add(key);
  draw();
}

function pause() {
  state.paused = !state.paused;
  $("pause").setAttribute("aria-pressed", String(state.paused));
  $("pause").textContent = state.paused ? "Resume" : "Pause";
  draw();
}

$("pause").addEventListener("click", pause);
$("filter").addEventListener("change", (event) => {
  state.filter = event.target.value;
  draw();
});
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("select, button")) return;
  const bar = event.target.closest(".bar");
  if (event.key === "p" || event.key === "P") {
    pause();
  } else if (bar && (event.key === "Enter" || event.key === " ")) {
    event.preventDefault();
    toggle(bar.dataset.key);
  } else if (event.key === "ArrowDown" || event.key === "ArrowUp") {
    const all = [...document.querySelectorAll(".bar")];
    if (!all.length) return;
    event.preventDefault();
    const step = event.key === "ArrowDown" ? 1 : -1;
    const at = bar ? all.indexOf(bar) + step : 0;
    all[Math.min(Math.max(at, 0), all.length - 1)].focus();
  }
});

function frame() {
  if (!document.hidden) draw();
  setTimeout(frame, 200);
}

link("connecting", "connecting");
connect();
frame();
