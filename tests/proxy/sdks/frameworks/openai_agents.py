from agents import Agent, Runner, function_tool
from two_steps import QUESTION, WISH, Record, convert, tell, weather

asked = Agent(name="asked", model="tiny", tools=[function_tool(weather), function_tool(convert)])
formed = Agent(name="formed", model="tiny", output_type=Record)
tell(Runner.run_sync(asked, QUESTION).final_output, Runner.run_sync(formed, WISH).final_output)
