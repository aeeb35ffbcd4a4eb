from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool
from two_steps import ADDRESS, KEY, QUESTION, WISH, Record, convert, tell, weather

llm = LLM(model="openai/tiny", base_url=ADDRESS, api_key=KEY)
tools = [tool("weather")(weather), tool("convert")(convert)]
agent = Agent(role="guide", goal="answer", backstory="You know cities.", tools=tools, llm=llm)
ask = Task(description=QUESTION, expected_output="one sentence", agent=agent)
answer = Crew(agents=[agent], tasks=[ask]).kickoff().raw
clerk = Agent(role="clerk", goal="make records", backstory="You write.", llm=llm)
form = Task(description=WISH, expected_output="a record", agent=clerk, output_pydantic=Record)
tell(answer, Crew(agents=[clerk], tasks=[form]).kickoff().pydantic)
