// A tool loop of several steps with the AI SDK's default OpenAI model, then another question with the same messages.
// Prints each request's kinds of items and each step's text as one line of JSON. Usage: steps.mjs URL KEY MODE
import { createOpenAI } from '@ai-sdk/openai';
import { generateText, stepCountIs, streamText, tool } from 'ai';
import { z } from 'zod';

const [url, apiKey, mode] = process.argv.slice(2);
const kinds = [];
const seen = async (target, init) => {
  const body = JSON.parse(init.body);
  kinds.push(body.input.map((item) => item.type ?? item.role));
  return fetch(target, init);
};
const model = createOpenAI({ baseURL: `${url}/v1`, apiKey, fetch: seen })('tiny');
const shell = tool({
  description: 'run a command',
  inputSchema: z.object({ command: z.string() }),
  execute: async ({ command }) => `ran ${command}`,
});
const ask = async (messages, providerOptions) => {
  const asked = { model, messages, tools: { shell }, stopWhen: stepCountIs(4), maxRetries: 0, providerOptions };
  if (mode === 'streamed') {
    const result = streamText(asked);
    await result.consumeStream();
    return { text: await result.text, response: await result.response, metadata: await result.providerMetadata };
  }
  const result = await generateText(asked);
  return { text: result.text, response: result.response, metadata: result.providerMetadata };
};
const messages = [{ role: 'user', content: 'go' }];
const first = await ask(messages);
const more = { role: 'user', content: 'and now?' };
const second =
  mode === 'previous'
    ? await ask([more], { openai: { previousResponseId: first.metadata.openai.responseId } })
    : await ask([...messages, ...first.response.messages, more]);
console.log(JSON.stringify({ kinds, texts: [first.text, second.text] }));
