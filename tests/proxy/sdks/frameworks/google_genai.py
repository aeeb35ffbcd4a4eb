import json
import os

from google import genai
from google.genai import types
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

client = genai.Client(
    api_key=os.environ["OPENAI_API_KEY"], http_options={"base_url": os.environ["OPENAI_BASE_URL"].removesuffix("/v1")}
)
thinking = types.ThinkingConfig(include_thoughts=True, thinking_budget=-1)
chat = client.chats.create(
    model="tiny", config=types.GenerateContentConfig(tools=[weather, convert], thinking_config=thinking)
)
answer = chat.send_message(QUESTION).text
form = types.GenerateContentConfig(response_mime_type="application/json", response_schema=Record)
record = client.models.generate_content(model="tiny", contents=WISH, config=form).parsed
print(json.dumps({"answer": answer, "record": record.model_dump()}))
