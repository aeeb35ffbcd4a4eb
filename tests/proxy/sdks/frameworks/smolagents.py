import json
import os

from smolagents import OpenAIServerModel, ToolCallingAgent, tool


@tool
def weather(city: str) -> str:
    """The weather in a city.

    Args:
        city: its name
    """
    return "21 degrees Celsius"


@tool
def convert(celsius: int) -> str:
    """A temperature as people in Boston say it.

    Args:
        celsius: the temperature
    """
    return "70 degrees Fahrenheit"


model = OpenAIServerModel("tiny", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
agent = ToolCallingAgent(tools=[weather, convert], model=model, max_steps=5)
print(json.dumps({"answer": agent.run("How warm is it in Paris, as people in Boston say it?")}))
