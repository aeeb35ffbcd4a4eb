"""The bundles that sandboxes mount: an agent with all that it needs, and the Python and Node.js that they share. No
sandboxes.
"""
