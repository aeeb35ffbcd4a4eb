import asyncio
import json

from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import ModelInfo
from autogen_ext.models.openai import OpenAIChatCompletionClient
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


async def main() -> None:
    info = ModelInfo(vision=False, function_calling=True, json_output=True, family="unknown", structured_output=True)
    client = OpenAIChatCompletionClient(model="tiny", model_info=info)
    asked = AssistantAgent("asked", client, tools=[weather, convert], max_tool_iterations=4)
    formed = AssistantAgent("formed", client, output_content_type=Record)
    answer = (await asked.run(task=QUESTION)).messages[-1].content
    record = (await formed.run(task=WISH)).messages[-1].content
    print(json.dumps({"answer": answer, "record": record.model_dump()}))


asyncio.run(main())
