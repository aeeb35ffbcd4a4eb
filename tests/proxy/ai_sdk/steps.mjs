// A tool loop of several steps with the AI SDK's default OpenAI model, then another question with the same messages.
// Prints each request's kinds of items, the arguments in it and each step's text as one line of JSON.
// Usage: steps.mjs URL KEY MODE
import { createOpenAI } from '@ai-sdk/openai';
import { generateText, stepCountIs, streamText, tool } from 'ai';
import { z } from 'zod';

const [url, apiKey, mode] = process.argv.slice(2);
globalThis.AI_SDK_LOG_WARNINGS = false; // it writes them to stdout
const kinds = [];
const echoed = [];
const seen = async (target, init) => {
  const body = JSON.parse(init.body);
  kinds.push(body.input.map((item) => item.type ?? item.role));
  echoed.push(...body.input.flatMap((item) => item.arguments ?? []));
  return fetch(target, init);
};
const model = createOpenAI({ baseURL: `${url}/v1`, apiKey, fetch: seen })('tiny');
const shell = tool({
  description: 'run a command',
  inputSchema: z.object({ command: z.string(), id: z.number() }),
  execute: async ({ command, id }) => `ran ${command} for ${id}`,
});
const ask = async (messages, providerOptions = mode === 'echoed' ? { openai: { store: false } } : undefined) => {
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
console.log(JSON.stringify({ kinds, echoed, texts: [first.text, second.text] }));
