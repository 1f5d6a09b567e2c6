"""The prompts of the golden file: short and long, with and without a system message, several scripts, code.

Every prompt is a dict with a `name` and either `messages` (chat) or `text` (raw completion). Texts written here
for this purpose; the long ones are composed by rule so that this file stays readable.
"""

PLACES = ["harbour", "mill", "north gate", "observatory", "quarry", "ferry", "old library", "greenhouse"]
PEOPLE = ["Ada", "Boris", "Chiyo", "Dalia", "Emre", "Farah", "Goran", "Hilde", "Imani"]
THINGS = ["a brass key", "three letters", "a broken lantern", "maps of the coast", "a crate of apples", "the ledger"]


def diary(days):
    """A dull diary: long, regular, and with facts that can be asked for."""
    lines = []
    for day in range(1, days + 1):
        who, where, what = PEOPLE[day * 7 % 9], PLACES[day * 5 % 8], THINGS[day * 11 % 6]
        lines.append(f"Day {day}. {who} walked to the {where} and came back with {what}; "
                     f"the wind was {(day * 37) % 50 + 3} km/h and we paid {day * 13 % 97} coins.")
    return "\n".join(lines)


def log(lines):
    """A server log."""
    levels = ["INFO", "WARN", "INFO", "DEBUG", "ERROR"]
    return "\n".join(
        f"2031-04-{i % 28 + 1:02d}T{i * 7 % 24:02d}:{i * 13 % 60:02d}:00Z {levels[i % 5]} "
        f"worker-{i % 4} request={i * 7919 % 10007:05d} took {i * 31 % 900 + 5} ms" for i in range(lines))


def table(rows):
    """A Markdown table."""
    head = "| id | item | price | stock |\n|---|---|---|---|\n"
    return head + "\n".join(
        f"| {i} | {THINGS[i % 6].split(' ', 1)[-1]} {i} | {i * 17 % 89}.{i % 10}0 € | {i * 29 % 41} |"
        for i in range(rows))


def user(name, text, system=None):
    messages = [{"role": "system", "content": system}] if system is not None else []
    return {"name": name, "messages": messages + [{"role": "user", "content": text}]}


CODE = '''def merge(intervals):
    """Merge overlapping [start, end) intervals."""
    out = []
    for start, end in sorted(intervals):
        if out and start <= out[-1][1]:
            out[-1][1] = max(out[-1][1], end)
        else:
            out.append([start, end])
    return out
'''

PROMPTS = [
    {"name": "raw_ten_tokens", "text": "The quick brown fox jumps over the lazy dog and"},
    {"name": "raw_code", "text": "fn main() {\n    let numbers = vec![1, 2, 3];\n    let total: i32 = numbers.iter()"},
    {"name": "raw_digits", "text": "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18"},
    user("capital", "What is the capital of France?"),
    user("system_pirate", "How do I boil an egg?", "You are a pirate. Answer in one short sentence."),
    user("system_empty", "Name three primary colours.", ""),
    user("emoji", "Explain these emoji: 🦀🔥👩‍🚀🏳️‍🌈 and this one: 🇯🇵"),
    user("chinese", "请用一句话介绍一下北京。然后告诉我长城有多长?"),
    user("japanese_korean", "東京タワーの高さは何メートルですか?\n한국의 수도는 어디입니까?"),
    user("arabic_russian", "ما هي عاصمة مصر؟ А какая столица России?", "Answer in the language of the question."),
    user("accents", "Übersetze ins Englische: „Die Größe der Straße überrascht jeden, naïve Gäste müssen früh aufstehen.“ Ça va, señor Ångström?"),
    user("whitespace", "Keep   the\t\tspaces\n\n\n  and   the   indentation:\n    a\n\tb\n        c   \n\nDone?"),
    user("python", "What does this function do, and what is its complexity?\n\n```python\n" + CODE + "```"),
    user("json", 'Return the value of "b" in {"a": [1, 2, {"b": "\\u00e9\\n"}], "c": null, "d": -1.5e-3}.'),
    {"name": "many_turns", "messages": [
        {"role": "system", "content": "You are a patient teacher."},
        {"role": "user", "content": "What is a prime number?"},
        {"role": "assistant", "content": "A whole number greater than 1 with no divisors except 1 and itself."},
        {"role": "user", "content": "Is 51 prime?"},
        {"role": "assistant", "content": "No: 51 = 3 × 17."},
        {"role": "user", "content": "And 53? Then list the primes between 60 and 80."}]},
    user("diary_8", diary(8) + "\n\nWho went out on day 3, and what did they bring back?"),
    {"name": "exactly_256", "text": diary(40), "tokens": 256},
    {"name": "exactly_257", "text": log(40), "tokens": 257},
    {"name": "exactly_513", "text": table(60), "tokens": 513},
    user("table_20", table(20) + "\n\nWhich item is the most expensive?", "Answer briefly."),
    user("log_16", log(16) + "\n\nHow many ERROR lines are there?"),
    user("diary_24", diary(24) + "\n\nSummarise the diary in two sentences.", "You are a careful archivist."),
    user("code_and_log", "```python\n" + CODE * 4 + "```\n\n```\n" + log(20) + "\n```\n\nWrite a regular expression for the log lines."),
    user("diary_53", diary(53) + "\n\nOn which days did Chiyo go out?", "You are a careful archivist. Quote the days."),
]
