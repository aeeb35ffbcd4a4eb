"""Between prompts and messages, by the model's chat template: reads recorded prompts, renders demonstrations. No live
calls.
"""
