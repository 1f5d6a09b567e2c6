"""The comparison as Markdown: medians over the rounds, with the smallest and largest round in brackets."""

import statistics


def markdown(results):
    names = list(results["gateways"])
    scenarios = list(dict.fromkeys(run["scenario"] for run in results["runs"]))
    rates = [s for s in scenarios if s.startswith("rate_")]
    streams = [s for s in scenarios if s.startswith("streams_")]
    lines = []
    if rates:
        lines += ["Short whole answers (16 tokens), added time, p50 / p99 in ms:", ""]
        lines += rows(["gateway", *(f"{s[5:]}/s" for s in rates)],
                      [[n, *(added(results, n, s, "answer") for s in rates)] for n in names])
    if "max" in scenarios:
        lines += ["", "As many short answers as there can be, 32 connections:", ""]
        lines += rows(["gateway", "requests/s", "requests per CPU second of the gateway", "CPU ms per request", "memory MiB"],
                      [[n, spread(results, n, "max", lambda r: r["answers"] / r["wall_s"], 0),
                        spread(results, n, "max", lambda r: r["answers"] / max(r["cpu_s"], 0.01), 0),
                        spread(results, n, "max", lambda r: 1000 * r["cpu_s"] / max(r["answers"], 1), 3),
                        spread(results, n, "max", lambda r: r["memory_peak_bytes"] / 2**20, 0)] for n in names])
    for s in streams:
        lines += ["", f"{s[8:]} concurrent stream(s):", ""]
        lines += rows(["gateway", "added time of a token on its way, p50 / p99 ms", "added inter-token latency, p50 / p99 ms",
                       "first token, added p50 / p99 ms", "tokens/s", "CPU s per 1,000 tokens", "memory MiB", "KiB per stream",
                       "failed"],
                      [[n, added(results, n, s, "on_the_way"), added(results, n, s, "inter_token"),
                        added(results, n, s, "first_token"),
                        spread(results, n, s, lambda r: r["tokens"] / r["wall_s"], 0),
                        spread(results, n, s, lambda r: 1000 * r["cpu_s"] / max(r["tokens"], 1), 4),
                        spread(results, n, s, lambda r: r["memory_peak_bytes"] / 2**20, 0),
                        spread(results, n, s, lambda r: (r["memory_peak_bytes"] - r["memory_before_bytes"]) / 1024 / int(s[8:]), 0),
                        str(sum(r["failures"] for r in runs(results, n, s)))] for n in names])
    machine = results["machine"]
    lines += ["", f"{results['date']}, {machine['cpu']}, {machine['cores']} cores, Linux {machine['kernel']}, "
                  f"{results['rounds']} rounds, all taking turns; median [smallest – largest round]. The lines `direct` are "
                  "absolute values, the others what the gateway added to them. CPU of `direct` is the source's own."]
    lines += ["", "Settings: " + "; ".join(f"{n}: {s}" for n, s in results["gateways"].items()) + "."]
    lines += ["", "pd-bridge renders the chat template, tokenizes the prompt and turns every token id back into text; the "
                  "others hand bytes through. Nothing that a user would have on is off."]
    lines += [f"\nLeft out: {n}: {why}" for n, why in results["missing"].items()]
    return "\n".join(lines) + "\n"


def runs(results, name, scenario):
    return [r for r in results["runs"] if (r["gateway"], r["scenario"]) == (name, scenario)]


def added(results, name, scenario, key):
    """Quantiles of a gateway minus those of `direct` in the same round."""
    mine, zero = runs(results, name, scenario), runs(results, "direct", scenario)
    if name == "direct":
        return " / ".join(spaced([r[key][q] / 1000 for r in mine], 2) for q in ("p50_us", "p99_us"))
    if not all(r["answers"] for r in mine):
        return "no answers"
    return " / ".join(spaced([(m[key][q] - z[key][q]) / 1000 for m, z in zip(mine, zero)], 2) for q in ("p50_us", "p99_us"))


def spread(results, name, scenario, value, digits):
    return spaced([value(r) for r in runs(results, name, scenario)], digits)


def spaced(values, digits):
    if not values:
        return "–"
    middle = f"{statistics.median(values):,.{digits}f}"
    return middle if len(values) == 1 else f"{middle} [{min(values):,.{digits}f} – {max(values):,.{digits}f}]"


def rows(head, body):
    return ["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *("| " + " | ".join(row) + " |" for row in body)]
