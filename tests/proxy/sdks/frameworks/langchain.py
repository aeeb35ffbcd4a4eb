import json

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
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

model = ChatOpenAI(model="tiny")
asked = create_agent(model, tools=[weather, convert]).invoke({"messages": [{"role": "user", "content": QUESTION}]})
formed = create_agent(model, tools=[], response_format=Record).invoke({"messages": [{"role": "user", "content": WISH}]})
print(json.dumps({"answer": asked["messages"][-1].content, "record": formed["structured_response"].model_dump()}))
