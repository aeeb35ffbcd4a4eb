from pydantic_ai import Agent
from pydantic_ai.models.google import GoogleModel
from pydantic_ai.providers.google import GoogleProvider
from two_steps import GOOGLE_ADDRESS, KEY, QUESTION, WISH, Record, convert, tell, weather

model = GoogleModel("tiny", provider=GoogleProvider(api_key=KEY, base_url=GOOGLE_ADDRESS))
answer = Agent(model, tools=[weather, convert]).run_sync(QUESTION).output
tell(answer, Agent(model, output_type=Record).run_sync(WISH).output)
