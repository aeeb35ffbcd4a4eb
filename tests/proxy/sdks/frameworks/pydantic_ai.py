from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from two_steps import QUESTION, WISH, Record, convert, tell, weather

model = OpenAIChatModel("tiny")
answer = Agent(model, tools=[weather, convert]).run_sync(QUESTION).output
tell(answer, Agent(model, output_type=Record).run_sync(WISH).output)
