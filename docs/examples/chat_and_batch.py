"""Print a trace of three hours of chat in tier standard, with 500 long documents in tier background each hour."""

import json
import random

draw = random.Random(0)
rows, seconds = [], 0.0
while (seconds := seconds + draw.expovariate(2)) < 3 * 3600:
    rows.append((seconds, draw.lognormvariate(7, 0.7), draw.lognormvariate(5, 0.5), "standard"))
for hour in range(3):
    for _ in range(500):
        at = hour * 3600 + 600 + draw.uniform(0, 30)
        rows.append((at, draw.lognormvariate(9, 0.3), draw.lognormvariate(6, 0.3), "background"))
for at, prompt, answer, tier in sorted(rows):
    tokens = {"input_length": int(prompt) + 1, "output_length": int(answer) + 1}
    print(json.dumps({"timestamp": round(at * 1000), **tokens, "tier": tier}))
