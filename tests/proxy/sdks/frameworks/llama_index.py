import asyncio
import json
import os

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.llms.openai_like import OpenAILike
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
    llm = OpenAILike(
        model="tiny", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"], is_chat_model=True,
        is_function_calling_model=True, context_window=30000,
    )  # fmt: skip
    answer = await FunctionAgent(tools=[weather, convert], llm=llm, system_prompt="You know cities.").run(QUESTION)
    record = await llm.as_structured_llm(Record).acomplete(WISH)
    print(json.dumps({"answer": str(answer), "record": record.raw.model_dump()}))


asyncio.run(main())
