import json
import os

from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool
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

llm = LLM(model="openai/tiny", base_url=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
tools = [tool("weather")(weather), tool("convert")(convert)]
agent = Agent(role="guide", goal="answer", backstory="You know cities.", tools=tools, llm=llm)
ask = Task(description=QUESTION, expected_output="one sentence", agent=agent)
answer = Crew(agents=[agent], tasks=[ask]).kickoff().raw
clerk = Agent(role="clerk", goal="make records", backstory="You write.", llm=llm)
form = Task(description=WISH, expected_output="a record", agent=clerk, output_pydantic=Record)
record = Crew(agents=[clerk], tasks=[form]).kickoff().pydantic
print(json.dumps({"answer": answer, "record": record.model_dump()}))
