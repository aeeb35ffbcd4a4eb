from smolagents import CodeAgent, OpenAIServerModel, tool
from two_steps import ADDRESS, KEY, QUESTION, convert, tell, weather

model = OpenAIServerModel("tiny", api_base=ADDRESS, api_key=KEY)
tell(CodeAgent(tools=[tool(weather), tool(convert)], model=model, verbosity_level=0).run(QUESTION))
