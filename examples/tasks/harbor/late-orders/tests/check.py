"""Print the rewards as JSON: half for each of the two answers."""

import json

RIGHT = {"late": 163, "top": "Dahl"}

try:
    with open("/app/answer.json") as file:
        answer = json.load(file)
except (OSError, ValueError):
    answer = None
parts = {name: float(isinstance(answer, dict) and answer.get(name) == value) for name, value in RIGHT.items()}
print(json.dumps({"reward": sum(parts.values()) / len(parts), **parts}))
