import json

from agents import Agent, Runner, function_tool
from pydantic import BaseModel


def weather(city: str) -> str:
    """The weather in a city."""
    return "21 degrees Celsius"


def convert(celsius: int) -> str:
    """A temperature as people in Boston say it."""
    return "70 degrees Fahrenheit"


class Record(BaseModel):
    city: str
    fahrenheit: int


QUESTION = "How warm is it in Paris, as people in Boston say it?"
WISH = "Make a record: in Paris it is 70 degrees Fahrenheit."

asked = Agent(name="asked", model="tiny", tools=[function_tool(weather), function_tool(convert)])
formed = Agent(name="formed", model="tiny", output_type=Record)
answer = Runner.run_sync(asked, QUESTION).final_output
record = Runner.run_sync(formed, WISH).final_output
print(json.dumps({"answer": answer, "record": record.model_dump()}))
