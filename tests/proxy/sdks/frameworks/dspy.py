"""DSPy writes its own prompts: it asks for the next tool, and for the answer, as marked fields of a text."""

import dspy
from two_steps import ADDRESS, KEY, QUESTION, convert, tell, weather

dspy.configure(lm=dspy.LM("openai/tiny", api_base=ADDRESS, api_key=KEY, cache=False))
tell(dspy.ReAct("question -> answer", tools=[weather, convert])(question=QUESTION).answer)
