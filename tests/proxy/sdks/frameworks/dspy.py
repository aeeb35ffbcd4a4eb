"""DSPy writes its own prompts: it asks for the next tool, and for the answer, as marked fields of a text."""

import json
import os

import dspy


def weather(city: str) -> str:
    """The weather in a city."""
    return "21 degrees Celsius"


def convert(celsius: int) -> str:
    """A temperature as people in Boston say it."""
    return "70 degrees Fahrenheit"


model = dspy.LM(
    "openai/tiny", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"], cache=False
)
dspy.configure(lm=model)
agent = dspy.ReAct("question -> answer", tools=[weather, convert])
print(json.dumps({"answer": agent(question="How warm is it in Paris, as people in Boston say it?").answer}))
