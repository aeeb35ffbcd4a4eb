from agno.agent import Agent
from agno.models.openai.like import OpenAILike
from two_steps import ADDRESS, KEY, QUESTION, WISH, Record, convert, tell, weather


def model() -> OpenAILike:
    return OpenAILike(id="tiny", base_url=ADDRESS, api_key=KEY)


answer = Agent(model=model(), tools=[weather, convert], telemetry=False).run(QUESTION).content
tell(answer, Agent(model=model(), output_schema=Record, telemetry=False).run(WISH).content)
