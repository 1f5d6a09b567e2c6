"""Records what other samplers leave of a distribution, for the sampler's tests to compare with.

usage: make_golden.py transformers|mlx-lm >NAME.json

transformers.json was made with transformers and torch on a GPU machine that has both, mlx_lm.json with mlx-lm 0.32.2 on a
CPU (tests/golden/requirements.txt); each file names its versions. `temperature`, `top_k`, `top_p` and `min_p` follow one
another in transformers as they do here; mlx-lm divides by the temperature last, so its cases have one filter each.
"""
import importlib.metadata
import json
import sys

CASES = [  # vocabulary, seed, squarings, sampling, prompt, answer
    (60, 1, 2, {}, [], []),
    (60, 2, 2, {"temperature": 0.7}, [], []),
    (60, 3, 1, {"temperature": 1.8}, [], []),
    (60, 4, 2, {"top_k": 1}, [], []),
    (60, 5, 1, {"top_k": 7}, [], []),
    (60, 6, 1, {"top_p": 0.9}, [], []),
    (60, 7, 2, {"top_p": 0.31}, [], []),
    (60, 8, 1, {"min_p": 0.05}, [], []),
    (60, 9, 2, {"min_p": 0.4}, [], []),
    (60, 10, 1, {"repetition_penalty": 1.3}, [3, 9, 3, 44], [17, 9, 58]),
    (60, 11, 1, {"repetition_penalty": 0.8}, [1, 2], [3]),
    (60, 12, 1, {"temperature": 0.8, "top_k": 20, "top_p": 0.85}, [], []),
    (60, 13, 1, {"temperature": 1.5, "top_k": 30, "top_p": 0.95, "min_p": 0.1}, [], []),
    (60, 14, 1, {"temperature": 1.2, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.1}, [5, 6], [7, 7]),
    (60, 15, 1, {"logit_bias": [[4, 3.5], [40, -100], [59, 100]]}, [], []),
    (60, 16, 1, {"presence_penalty": 1.5}, [], [3, 9, 3, 44]),
    (60, 17, 1, {"frequency_penalty": 0.6}, [], [3, 9, 3, 44, 3]),
    (60, 18, 1, {"repetition_penalty": 1.2, "presence_penalty": -0.7, "frequency_penalty": 0.4,
                 "logit_bias": [[3, 2.0], [30, -4.0]]}, [], [3, 9, 3, 44, 30]),
    (49152, 19, 6, {"top_k": 50}, [], []),
    (49152, 20, 6, {"temperature": 0.6, "top_p": 0.8}, [], []),
    (49152, 21, 6, {"temperature": 0.9, "min_p": 0.3}, [], []),
    (151936, 22, 7, {"temperature": 0.7, "top_k": 40, "top_p": 0.9}, [], []),
    (151936, 23, 7, {"top_k": 200, "top_p": 0.7, "min_p": 0.2}, [], []),
]


def logits(n, seed, squarings):
    """Spread evenly over 0 to 1, then bent towards 0, times 20, minus 10: as few likely tokens as a model has."""
    values = []
    for i in range(n):
        u = ((i * 2654435761 + seed * 40503) % 2**32) / 2**32
        for _ in range(squarings):
            u *= u
        values.append(u * 20.0 - 10.0)
    return values


def transformers(values, s, prompt, answer):
    import torch
    import transformers.generation.logits_process as p
    if {"logit_bias", "presence_penalty", "frequency_penalty"} & set(s):
        return None
    chain = [("repetition_penalty", p.RepetitionPenaltyLogitsProcessor), ("temperature", p.TemperatureLogitsWarper),
             ("top_k", p.TopKLogitsWarper), ("top_p", p.TopPLogitsWarper), ("min_p", p.MinPLogitsWarper)]
    ids = torch.tensor([prompt + answer], dtype=torch.long)
    scores = torch.tensor([values], dtype=torch.float32)
    for name, processor in chain:
        if name in s:
            scores = processor(s[name])(ids, scores)
    return torch.softmax(scores, -1)[0].tolist()


def mlx_lm(values, s, prompt, answer):
    import mlx.core as mx
    from mlx_lm import sample_utils as u
    filters = [name for name in ("temperature", "top_k", "top_p", "min_p") if name in s]
    if len(filters) > 1:
        return None
    history = prompt + answer
    x = mx.array([values], dtype=mx.float32)
    biases = {int(t): float(b) for t, b in s.get("logit_bias", [])}
    size = max(1, len(history))
    for processor in u.make_logits_processors(
            biases or None, s.get("repetition_penalty"), size, s.get("presence_penalty"), size,
            s.get("frequency_penalty"), size):
        x = processor(mx.array(history), x)
    x = x - mx.logsumexp(x, keepdims=True)
    for name in filters:
        if name == "temperature":
            x = x * (1.0 / s[name])
        else:
            x = getattr(u, f"apply_{name}")(x, s[name])
    return mx.softmax(x, -1)[0].tolist()


which, packages = {"transformers": (transformers, ["transformers", "torch"]), "mlx-lm": (mlx_lm, ["mlx-lm", "mlx"])}[sys.argv[1]]
print(json.dumps({"made_by": {p: importlib.metadata.version(p) for p in packages}})[:-1] + ', "cases": [', end="")
comma = "\n"
for n, seed, squarings, sampling, prompt, answer in CASES:
    result = which(logits(n, seed, squarings), sampling, prompt, answer)
    if result is not None:
        kept = [[token, float(f"{p:.7g}")] for token, p in enumerate(result) if p > 0]
        case = {"vocab": n, "seed": seed, "squarings": squarings, "sampling": sampling, "prompt": prompt, "answer": answer,
                "kept": kept}
        print(comma + json.dumps(case, separators=(",", ":")), end="")
        comma = ",\n"
print("\n]}")
