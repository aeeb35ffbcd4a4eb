import json
import os

from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.google import GoogleModel
from pydantic_ai.providers.google import GoogleProvider


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

address = os.environ["OPENAI_BASE_URL"].removesuffix("/v1")
model = GoogleModel("tiny", provider=GoogleProvider(api_key=os.environ["OPENAI_API_KEY"], base_url=address))
answer = Agent(model, tools=[weather, convert]).run_sync(QUESTION).output
record = Agent(model, output_type=Record).run_sync(WISH).output
print(json.dumps({"answer": answer, "record": record.model_dump()}))
