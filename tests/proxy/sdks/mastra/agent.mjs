// Does the task of the frameworks with the Agent of Mastra, and prints its answer as JSON.
import { Agent } from '@mastra/core/agent';
import { createTool } from '@mastra/core/tools';
import { z } from 'zod';

const { OPENAI_BASE_URL: url, OPENAI_API_KEY: apiKey } = process.env;
const weather = createTool({
  id: 'weather',
  description: 'The weather in a city.',
  inputSchema: z.object({ city: z.string() }),
  execute: async () => '21 degrees Celsius',
});
const convert = createTool({
  id: 'convert',
  description: 'A temperature as people in Boston say it.',
  inputSchema: z.object({ celsius: z.number() }),
  execute: async () => '70 degrees Fahrenheit',
});
const agent = new Agent({
  id: 'forecaster',
  name: 'forecaster',
  instructions: 'You answer questions about the weather.',
  model: { id: 'blackforge/tiny', url, apiKey },
  tools: { weather, convert },
});
const question = 'How warm is it in Paris, as people in Boston say it?';
const { text } = await agent.generate(question, { maxSteps: 4 });
console.log(JSON.stringify({ answer: text }));
