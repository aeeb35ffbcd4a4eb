"""instructor has no tools of its own: each step is a record that the model fills in."""

import json

import instructor
import openai
from pydantic import BaseModel


class Reading(BaseModel):
    city: str
    celsius: int


class Record(BaseModel):
    city: str
    fahrenheit: int


client = instructor.from_openai(openai.OpenAI())
messages = [{"role": "user", "content": "How warm is it in Paris?"}]
reading = client.chat.completions.create(model="tiny", response_model=Reading, messages=messages)
messages += [
    {"role": "assistant", "content": reading.model_dump_json()},
    {"role": "user", "content": "Make a record: in Paris it is 70 degrees Fahrenheit."},
]
record = client.chat.completions.create(model="tiny", response_model=Record, messages=messages)
print(json.dumps({"answer": f"{record.fahrenheit} degrees Fahrenheit", "record": record.model_dump()}))
