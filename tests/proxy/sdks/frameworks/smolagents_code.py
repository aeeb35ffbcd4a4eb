import json
import os

from smolagents import CodeAgent, OpenAIServerModel, tool


@tool
def weather(city: str) -> str:
    """The weather in a city.

    Args:
        city: The city's name.
    """
    return "21 degrees Celsius"


@tool
def convert(celsius: int) -> str:
    """A temperature as people in Boston say it.

    Args:
        celsius: The temperature.
    """
    return "70 degrees Fahrenheit"


model = OpenAIServerModel("tiny", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
agent = CodeAgent(tools=[weather, convert], model=model, verbosity_level=0)
answer = agent.run("How warm is it in Paris, as people in Boston say it?")
print(json.dumps({"answer": answer}))
