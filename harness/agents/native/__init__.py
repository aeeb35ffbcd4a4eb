"""The white-box agent: a loop of its own whose context management is made of tool calls. Standard library only.

Its files import nothing but each other, so the folder may be copied out of the project: `python -m native`.
"""
