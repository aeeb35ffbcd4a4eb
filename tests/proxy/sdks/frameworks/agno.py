import json
import os

from agno.agent import Agent
from agno.models.openai.like import OpenAILike
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


def model() -> OpenAILike:
    return OpenAILike(id="tiny", base_url=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])


answer = Agent(model=model(), tools=[weather, convert], telemetry=False).run(QUESTION).content
record = Agent(model=model(), output_schema=Record, telemetry=False).run(WISH).content
print(json.dumps({"answer": answer, "record": record.model_dump()}))
